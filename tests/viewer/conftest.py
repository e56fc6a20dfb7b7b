"""Fixtures that make a browser, and the pages of a small model, once for all tests."""

import warnings

import numpy as np
import pytest

import tapax
from tests.viewer import programs
from tests.viewer.chromium import Chromium


@pytest.fixture(scope="session")
def chromium():
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def captured():
    """Return the taps of a train step of a small transformer, and its tokens."""
    return programs.capture_step()


@pytest.fixture(scope="session")
def capture_page(captured, tmp_path_factory):
    taps, tokens = captured
    path = tmp_path_factory.mktemp("pages") / "capture.html"
    tapax.view(taps, tokens=tokens).save(path)
    return path


@pytest.fixture(scope="session")
def run_log(tmp_path_factory):
    """Return the path of the log of a short run, with histograms and alerts."""
    path = tmp_path_factory.mktemp("logs") / "run.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs.monitor_run(path)
    return path


@pytest.fixture(scope="session")
def run_page(run_log, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "run.html"
    tapax.view(run_log).save(path)
    return path


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def stub_bundle(monkeypatch):
    """Replace the bundle by one that draws nothing, for tests without a browser."""
    stub = "var tapaxPage = { render() {} };"
    for module in ("_html", "_notebook", "_server"):
        monkeypatch.setattr(f"tapax.viewer.{module}.read_bundle", lambda: stub)
    return stub
