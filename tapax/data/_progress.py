"""The progress bar of a harvest: rows and bytes per second, time left, and the bottleneck."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tapax.data._meter import Meter

_SECONDS = 0.25
"""The interval at which the bar is drawn."""


@contextlib.contextmanager
def show_progress(meter: Meter, *, enabled: bool) -> Iterator[None]:
    """Show the counts of a meter while the block runs, if stderr is a terminal."""
    console = Console(stderr=True)
    if not enabled or not console.is_terminal or meter.expected == 0:
        yield
        return
    bar = Progress(
        TextColumn("harvest"),
        BarColumn(),
        TextColumn("{task.completed:.0f}{task.fields[of]} batches"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        transient=False,
    )
    task = bar.add_task("harvest", total=meter.expected, speed="", of="")
    stopped = threading.Event()

    def draw() -> None:
        while not stopped.wait(_SECONDS):
            _update(bar, task, meter)

    drawer = threading.Thread(target=draw, name="tapax-progress", daemon=True)
    with bar:
        drawer.start()
        try:
            yield
        finally:
            stopped.set()
            drawer.join()
            _update(bar, task, meter)


def _update(bar: Progress, task: TaskID, meter: Meter) -> None:
    total = meter.expected
    of = "" if total is None else f"/{total}"
    bar.update(task, completed=meter.batches, total=total, of=of, speed=describe_speed(meter))


def describe_speed(meter: Meter) -> str:
    """Describe the speed of a harvest and its bottleneck in a few words."""
    seconds = meter.seconds
    return (
        f"{_thousands(meter.rows / seconds)} rows/s, {meter.nbytes / seconds / 1e9:.2f} GB/s, "
        f"waits for {_WAITS[meter.bottleneck]}"
    )


_WAITS = {
    "batches": "batches",
    "device": "the device",
    "transfer": "copies to the host",
    "disk": "the disk",
}


def _thousands(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"
