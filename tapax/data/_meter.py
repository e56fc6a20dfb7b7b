"""How fast a harvest is, and what holds it up."""

import contextlib
import threading
import time
from collections.abc import Iterator

STAGES = ("batches", "device", "transfer", "disk")
"""What the harvest waits for: the next batch, its rows, their copy on the host, a writer."""


class Meter:
    """Counts rows and bytes, and the seconds that the harvest waited for each stage.

    One thread drives the harvest. It waits for one stage at a time, while the others go on, so the
    stage with most of the waiting is the slowest.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.rows = self.nbytes = self.batches = self.units = 0
        self.expected: int | None = None
        """How many batches there are to do, as far as is known; None for an iterable."""
        self.waited: dict[str, float] = dict.fromkeys(STAGES, 0.0)

        self._lock = threading.Lock()

    def add_unit(self, nbytes: int) -> None:
        """Count a shard; writers call this."""
        with self._lock:
            self.units += 1
            self.nbytes += nbytes

    @contextlib.contextmanager
    def waiting_for(self, stage: str) -> Iterator[None]:
        """Count the time spent within as waiting for a stage."""
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
        """The stage that the harvest waited for longest."""
        return max(STAGES, key=lambda stage: self.waited[stage])
