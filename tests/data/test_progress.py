"""The progress bar reports in a terminal and stays silent elsewhere."""

import io

import pytest
from rich.console import Console

from tapax.data import _progress
from tapax.data._meter import Meter
from tests.models.harvested import harvest


def test_a_terminal_shows_speed_and_bottleneck(tmp_path, monkeypatch):
    shown = io.StringIO()

    def make_console(stderr):
        assert stderr
        return Console(file=shown, force_terminal=True, width=120)

    monkeypatch.setattr(_progress, "Console", make_console)
    harvest(tmp_path / "acts")
    assert "7/7 batches" in shown.getvalue() and "rows/s" in shown.getvalue()
    assert "GB/s" in shown.getvalue() and "waits for" in shown.getvalue()
    length = len(shown.getvalue())
    harvest(tmp_path / "acts")  # all units are done
    harvest(tmp_path / "quiet", progress=False)
    assert len(shown.getvalue()) == length


def test_nothing_is_shown_where_there_is_no_terminal(tmp_path, capfd):
    harvest(tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("stage", ["batches", "device", "transfer", "disk"])
def test_the_bottleneck_is_what_was_waited_for_longest(stage):
    meter = Meter()
    meter.waited = dict.fromkeys(meter.waited, 1.0) | {stage: 2.0}
    meter.rows, meter.started = 123_456_789, meter.started - 10
    text = _progress.describe_speed(meter)
    assert meter.bottleneck == stage and text.startswith("12.3M rows/s")
