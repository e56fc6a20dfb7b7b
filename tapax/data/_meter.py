"""The speed of a harvest, and its bottleneck."""

import contextlib
import threading
import time
from collections.abc import Iterator

STAGES = ("batches", "device", "transfer", "disk")
"""The stages of a harvest: the next batch, its rows, their copy to the host, a writer."""


class Meter:
    """A counter of rows and bytes, and of the seconds that the harvest waited for each stage.

    One thread drives the harvest. It waits for one stage at a time, while the other stages
    continue, so the stage with the longest wait is the slowest.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.rows = self.nbytes = self.batches = self.units = 0
        self.expected: int | None = None
        """The number of batches to do, as far as is known; None for an iterable."""
        self.waited: dict[str, float] = dict.fromkeys(STAGES, 0.0)

        self._lock = threading.Lock()

    def add_unit(self, nbytes: int) -> None:
        """Count a shard of `nbytes` bytes; the writer threads call this."""
        with self._lock:
            self.units += 1
            self.nbytes += nbytes

    @contextlib.contextmanager
    def waiting_for(self, stage: str) -> Iterator[None]:
        """Count the duration of the block as time spent waiting for a stage."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.waited[stage] += time.monotonic() - start

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def bottleneck(self) -> str:
        """The stage with the longest wait."""
        return max(STAGES, key=lambda stage: self.waited[stage])
