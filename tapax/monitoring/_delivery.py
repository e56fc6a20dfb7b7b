"""Delivery: hands what a monitor found to its sinks, on a thread of its own, in order.

Nothing that happens there stops the training. A sink that fails is dropped, with one warning; what
it has written before stays. `close` waits until everything is delivered, and closes the sinks. So
does the end of the interpreter, and the end of the monitor if nobody closed it.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tapax.monitoring._log import Alarm, Record

Found = tuple[int, Record, Iterable[Alarm]]
"""A step, its record, and its alarms."""

_unfinished: set[Delivery] = set()


class Delivery:
    """A queue of what was found, and the thread that works it off.

    `put` takes a function, called on that thread, that fetches what was found. If it raises, that
    is warned of once, and `on_error` is called.
    """

    def __init__(self, sinks: Sequence[Callable[..., Any]], on_error: Callable[[], None]):
        self._sinks = list(sinks)
        self._on_error = on_error
        # Its `put` may be called by the garbage collector, in the midst of another.
        self._queue: queue.SimpleQueue[Callable[[], Found] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tapax-monitor", daemon=True)
        _unfinished.add(self)
        # What is registered last is called first: before JAX, and what the sinks use, is shut down.
        atexit.unregister(_finish)
        atexit.register(_finish)
        self._thread.start()

    def put(self, fetch: Callable[[], Found]) -> None:
        """Has something delivered; returns at once."""
        self._queue.put(fetch)

    def end(self) -> None:
        """Has the sinks closed after what was put before; returns at once."""
        self._queue.put(None)

    def close(self) -> None:
        """Has the sinks closed, and waits for it."""
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        failed = False
        while (fetch := self._queue.get()) is not None:
            try:
                found = fetch()
            except BaseException as error:
                self._on_error()
                if not failed:
                    warn(f"The monitor is off, and the training goes on: {_shown(error)}")
                failed = True
            else:
                self._deliver(found)
            # What was fetched must not be kept alive while the thread waits.
            del fetch
            found = None
        for sink in self._sinks:
            self._try(sink, "close")
        _unfinished.discard(self)

    def _deliver(self, found: Found) -> None:
        step, record, alarms = found
        for sink in list(self._sinks):
            if self._try(sink, "", step, record):
                for alarm in alarms:
                    if not self._try(sink, "alert", alarm):
                        break

    def _try(self, sink: Any, method: str, *args: Any) -> bool:
        """Calls a sink, or a method that it may have. Whether it is still there."""
        call = getattr(sink, method, None) if method else sink
        try:
            if call is not None:
                call(*args)
            return True
        except BaseException as error:
            self._sinks = [other for other in self._sinks if other is not sink]
            warn(
                f"The sink {_name(sink)} failed and gets no more records; the training goes on, "
                f"and what it has written stays: {_shown(error)}"
            )
        if method != "close":
            with contextlib.suppress(BaseException):
                sink.close()
        return False


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns from the thread; where warnings are errors, there is nobody to catch one."""
    try:
        warnings.warn(message, category, stacklevel=2)
    except Exception:
        with contextlib.suppress(Exception):
            print(f"{category.__name__}: {message}", file=sys.stderr)


def _shown(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _name(sink: Any) -> str:
    name = getattr(sink, "__qualname__", None) or repr(sink)
    return name if len(name) < 100 and "\n" not in name else type(sink).__name__


def _finish() -> None:
    for delivery in list(_unfinished):
        delivery.close()
