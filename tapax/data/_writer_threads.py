"""Threads that write shards while the device computes, with a bounded number in memory."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def writer_count() -> int:
    """Return the number of threads that write: some wait for the disk while others compute."""
    return min(8, max(4, (os.cpu_count() or 4) // 2))


class ShardWriters:
    """A pool of threads that write shards.

    `submit` waits until fewer than `threads + 1` shards are in memory, so that a slow disk delays
    the harvest instead of filling the memory. The next call raises the error of a thread.
    """

    def __init__(self, threads: int):
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tapax-writer")
        self._slots = threading.BoundedSemaphore(threads + 1)
        self._running: list[Future[None]] = []

    def submit(self, write: Callable[..., None], *args: Any) -> None:
        """Call `write` in a thread."""
        self._slots.acquire()
        self._raise_errors()
        future = self._executor.submit(write, *args)
        future.add_done_callback(lambda _: self._slots.release())
        self._running.append(future)

    def finish(self) -> None:
        """Wait until all shards are written."""
        self._executor.shutdown(wait=True)
        self._raise_errors()

    def stop(self) -> None:
        """Finish the shards that threads are writing, and cancel the others."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _raise_errors(self) -> None:
        for future in [future for future in self._running if future.done()]:
            self._running.remove(future)
            future.result()
