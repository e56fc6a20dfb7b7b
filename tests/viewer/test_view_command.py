"""`tapax view`, `tapax.view` outside a notebook, and `monitor(..., to="page")`."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import jax.numpy as jnp
import pytest

import tapax
from tapax import sink
from tapax.__main__ import main
from tapax.viewer import _browser
from tapax.viewer._page import make_page
from tests.viewer.payload_decoder import Reader, read_saved


@pytest.fixture
def log(tmp_path):
    written = sink.jsonl(tmp_path / "run.jsonl")
    written(0, {"a/value_rms": 1.0})
    return written


@pytest.fixture
def opened(monkeypatch):
    """Record the addresses to open instead of opening a browser."""
    addresses = []
    monkeypatch.setattr(_browser, "open_browser", lambda url: bool(addresses.append(url)))
    return addresses


def test_save_writes_one_file_and_opens_nothing(log, tmp_path, stub_bundle, opened):
    _, taps = tapax.capture(lambda x: tapax.sow(x, "h"))(2.0)
    taps.save(tmp_path / "taps.safetensors")
    saved = tmp_path / "page.html"
    paths = [str(log.path), str(tmp_path / "taps.safetensors")]
    assert main(["view", *paths, "--save", str(saved)]) == 0
    reader = Reader(*read_saved(saved.read_text()))
    assert [subject["name"] for subject in reader.subjects] == ["run.jsonl", "taps.safetensors"]
    assert reader.numbers[1]["h", "value", "rms"] == [2.0]
    assert opened == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none.jsonl"], "There is no file or folder 'none.jsonl'"),
        (["run.jsonl", "--port", "70000"], "--port must be from 0 to 65535, but is 70000"),
        (["run.jsonl", "--save", "run.jsonl/page.html"], "run.jsonl"),
        ([], "the following arguments are required: PATH"),
    ],
)
def test_bad_arguments_end_with_one_sentence(
    log, tmp_path, monkeypatch, capsys, stub_bundle, arguments, text
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["view", *arguments])
    assert exit.value.code == 2
    assert text in capsys.readouterr().err


@pytest.fixture
def interruptible():
    """Let processes be interrupted; in a background job, shells ignore the signal for them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_command_serves_until_it_is_interrupted(log):
    environment = {**os.environ, "BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "tapax", "view", str(log.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line)[0]
        with urllib.request.urlopen(address.replace("/?", "/header?"), timeout=10) as response:
            assert b"run.jsonl" in response.read()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()


def test_view_opens_the_browser_unless_the_page_is_saved(log, tmp_path, stub_bundle, opened):
    tapax.view(log.path).save(tmp_path / "page.html")
    time.sleep(2 * _browser.OPEN_SECONDS)
    assert opened == []
    with tapax.view(log.path) as page:
        deadline = time.monotonic() + 10
        while not opened and time.monotonic() < deadline:
            time.sleep(0.02)
        assert opened == [page.serve()]


def test_a_script_goes_on_while_a_browser_shows_its_page(tmp_path):
    """The script ends soon after the browser of the test has loaded the page once."""
    browser = tmp_path / "browser.py"
    browser.write_text(
        "import sys, urllib.request\n"
        "url = sys.argv[1].replace('/?', '/header?')\n"
        "open(sys.argv[0] + '.seen', 'wb').write(urllib.request.urlopen(url).read())\n"
    )
    script = (
        "import tapax\nfrom tapax.viewer import _browser\n_browser.LEAVING_SECONDS = 0.3\n"
        "log = tapax.Log()\nlog(0, {'a/value_rms': 1.0})\ntapax.view(log)\n"
    )
    environment = {**os.environ, "BROWSER": f"{sys.executable} {browser} %s"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "tapax shows the page at http://127.0.0.1:" in done.stderr
    assert b'"tapax.page"' in (tmp_path / "browser.py.seen").read_bytes()


def test_a_monitor_shows_its_run_on_a_page(opened):
    step = tapax.monitor(lambda x: tapax.sow(2 * x, "h"), every=1, grads=None, to="page")
    (shown,) = step._delivery._sinks
    with shown.page as page:
        reader = Reader(page.header, page._payload.read_blob)
        with step:
            for i in range(3):
                step(jnp.float32(i))
        for update in page._payload.read_updates(0):
            reader.apply(update)
    assert reader.steps == [[0, 1, 2]]
    assert reader.numbers[0]["h", "value", "rms"] == [0, 2, 4]
    assert reader.messages[0] == [{"level": "info", "text": "The run has ended."}]


def test_an_installation_without_the_page_says_so_at_once(log, monkeypatch):
    def fail():
        raise FileNotFoundError("The page was not built")

    monkeypatch.setattr("tapax.viewer._server.read_bundle", fail)
    with pytest.raises(FileNotFoundError, match="not built"):
        tapax.view(log.path)
    with pytest.raises(FileNotFoundError, match="not built"):
        make_page(log.path).serve()


def test_pages_leave_no_thread_behind(log, opened):
    before = set(threading.enumerate())
    with tapax.view(log.path) as page:
        page.serve()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(threading.enumerate()) - before
