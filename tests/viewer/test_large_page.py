"""Large runs: the size of a saved file, and the tiles that the page reads."""

import numpy as np
import pytest

from tapax.viewer._assets import read_bundle
from tapax.viewer._blobs import Blobs
from tapax.viewer._format import FORMAT, MISSING, VERSION, empty_subject
from tapax.viewer._matrices import add_statistics
from tapax.viewer._page import Page
from tapax.viewer._payload import Payload
from tapax.viewer._site_columns import SiteRow, Sources, make_site_columns


@pytest.fixture
def quantised(monkeypatch):
    """Quantise statistics of any size, like those of ten thousand sites."""
    monkeypatch.setattr("tapax.viewer._matrices.EXACT_BYTES", 0)


def make_page(numbers):
    """Make a page of a run with these numbers by site and step, and ten sites to a layer."""
    parts = ["norm1", "query", "key", "value", "out", "attn", "norm2", "up", "down", "mlp"]
    names = [f"GPT/blocks/{i // 10}/{parts[i % 10]}" for i in range(len(numbers))]
    blobs = Blobs()
    sources = Sources(blobs)
    subject = empty_subject("log", "large")
    subject["sites"] = make_site_columns([SiteRow(name) for name in names], sources)
    steps = np.arange(numbers.shape[1], dtype=np.float64)
    subject["steps"] = blobs.add_array(steps, "f64", urgent=True)
    found = {("value", "rms"): (np.arange(len(numbers), dtype=np.int32), numbers)}
    subject["statistics"] = add_statistics(blobs, found, len(numbers))
    header = {"format": FORMAT, "version": VERSION, "title": "large", "subjects": [subject]}
    return Page(Payload({**header, "sources": [], "blobs": len(blobs)}, blobs, {}))


def walks(sites, steps, noise=0.02):
    rng = np.random.default_rng(0)
    numbers = np.empty((sites, steps), np.float32)
    for rows in np.array_split(np.arange(sites), max(1, sites // 500)):
        drift = np.cumsum(noise * rng.standard_normal((len(rows), steps)), 1)
        numbers[rows] = np.exp(drift + rng.standard_normal((len(rows), 1)))
    return numbers


@pytest.mark.parametrize("kind", ["walk", "noise"])
def test_a_saved_run_is_smaller_than_its_statistics_as_float32(tmp_path, kind, quantised):
    if kind == "walk":
        numbers = walks(1000, 2400)
    else:
        draws = np.random.default_rng(0).standard_normal((1000, 2400), np.float32)
        numbers = np.exp(3 * draws)
    make_page(numbers).save(tmp_path / "run.html")
    bundle = len(read_bundle())  # its size does not depend on the run
    assert (tmp_path / "run.html").stat().st_size - bundle < 0.6 * numbers.nbytes


@pytest.mark.once
def test_a_large_run_is_drawn_from_its_overview_and_zoomed_from_its_tiles(
    chromium, tmp_path, quantised
):
    numbers = walks(1500, 2400)
    numbers[1234, 2000] = 1e6
    numbers[5, 7] = np.nan
    numbers[6, 8] = MISSING
    make_page(numbers).save(tmp_path / "run.html")
    tab = chromium.open(tmp_path / "run.html")
    tab.wait("drawn.numbers")
    drawn = tab.drawn
    shown = np.array(drawn["numbers"], np.float64).reshape(drawn["height"], drawn["width"])
    # No pixel hides a spike or a NaN, however many numbers it summarises.
    row = np.searchsorted(drawn["rowEdges"], 1234, side="right") - 1
    column = np.searchsorted(drawn["columnEdges"], 2000, side="right") - 1
    assert shown[row, max(0, column - 2) : column + 2].max() == pytest.approx(1e6, rel=1e-2)
    assert np.isnan(shown[np.searchsorted(drawn["rowEdges"], 5, side="right") - 1]).any()
    tab.set(more={"columns": "1990-2010", "rows": "1230-1240"})
    tab.wait("drawn.isExact && drawn.width == 20")
    exact = np.reshape(tab.drawn["numbers"], (10, 20))
    np.testing.assert_allclose(exact, numbers[1230:1240, 1990:2010], rtol=2e-3)
    tab.set(site="GPT/blocks/0/out", stat="value.rms")
    tab.wait("series.length == 1")
    series = tab.evaluate("page.inspect().series[0].numbers")
    np.testing.assert_allclose(series, numbers[4], rtol=2e-3)
    tab.check_quiet()
    tab.close()


@pytest.mark.many
def test_ten_thousand_sites_by_ten_thousand_steps_are_drawn_and_zoomed(chromium, tmp_path):
    numbers = walks(10_000, 10_000)
    make_page(numbers).save(tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size < 0.6 * numbers.nbytes
    tab = chromium.open(tmp_path / "run.html")
    tab.wait("drawn.numbers")
    tab.set(more={"columns": "9000-9010", "rows": "8000-8005"})
    tab.wait("drawn.isExact && drawn.width == 10")
    exact = np.reshape(tab.drawn["numbers"], (5, 10))
    np.testing.assert_allclose(exact, numbers[8000:8005, 9000:9010], rtol=2e-3)
    tab.check_quiet()
    tab.close()
