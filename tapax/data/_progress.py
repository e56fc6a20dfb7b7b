"""The progress bar of a harvest: rows and bytes a second, the time left, and what holds it up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tapax.data._meter import Meter
from tapax.data._units import UnitPlan

_SECONDS = 0.25
"""How often the bar is drawn."""


@contextlib.contextmanager
def show_progress(
    meter: Meter, plan: UnitPlan, remaining: Sequence[int] | None, *, enabled: bool
) -> Iterator[None]:
    """Show what a meter counts while the block runs; nothing unless in a terminal."""
    console = Console(stderr=True)
    if not enabled or not console.is_terminal or remaining == []:
        yield
        return
    total = None
    if remaining is not None:
        total = sum(len(plan.batch_numbers(unit)) for unit in remaining)
    bar = Progress(
        TextColumn("harvest"),
        BarColumn(),
        TextColumn("{task.completed:.0f}" + (f"/{total}" if total else "") + " batches"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        transient=False,
    )
    task = bar.add_task("harvest", total=total, speed="")
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
    bar.update(task, completed=meter.batches, speed=describe_speed(meter))


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
