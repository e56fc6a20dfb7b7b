"""Threads that write shards while the device computes, and no more shards at a time than fit."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def writer_count() -> int:
    """How many threads write at a time."""
    return min(8, max(2, (os.cpu_count() or 2) // 2))


class ShardWriters:
    """Runs the writing of shards in threads.

    `submit` waits until less than `threads + 1` shards are in memory, so that a slow disk holds up
    the harvest instead of filling the memory. An error in a thread is raised by the next call.
    """

    def __init__(self, threads: int):
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tapax-writer")
        self._slots = threading.BoundedSemaphore(threads + 1)
        self._running: list[Future[None]] = []

    def submit(self, write: Callable[..., None], *args: Any) -> None:
        """Have a thread call `write`."""
        self._slots.acquire()
        self._raise_errors()
        future = self._executor.submit(write, *args)
        future.add_done_callback(lambda _: self._slots.release())
        self._running.append(future)

    def finish(self) -> None:
        """Wait until everything is written."""
        self._executor.shutdown(wait=True)
        self._raise_errors()

    def stop(self) -> None:
        """Finish the shards that are being written, and write no other."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _raise_errors(self) -> None:
        for future in [future for future in self._running if future.done()]:
            self._running.remove(future)
            future.result()
