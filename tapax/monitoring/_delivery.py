"""Delivery: a thread that passes the reports of a monitor to its sinks, in order.

No error on this thread stops the training. If a sink raises, the delivery drops it with one
warning; the records that the sink has written stay. `close` waits until every report is delivered,
and closes the sinks. The exit of the interpreter closes them too, as does the garbage collection of
a monitor that the user never closed.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from tapax._results.flow import LazyFlow
from tapax.monitoring._records import AlertEvent, Record


class Report(NamedTuple):
    """A step, its record, the alerts that went off, and the flow between the sites of the step."""

    step: int
    record: Record
    alerts: Iterable[AlertEvent]
    flow: LazyFlow | None = None


_unfinished: set[Delivery] = set()


class Delivery:
    """A queue of reports, and the thread that delivers them.

    `put` takes a function that fetches a report; the thread calls this function. If it raises, the
    thread warns once and calls `on_error`. In a run of several processes only process 0 delivers,
    unless `every_process` is True; the other processes only fetch.
    """

    def __init__(
        self,
        sinks: Sequence[Callable[..., Any]],
        on_error: Callable[[], None],
        every_process: bool = False,
    ):
        self._sinks = list(sinks)
        self._every_process = every_process
        self._on_error = on_error
        self._flow: LazyFlow | None = None
        # Simple, because the garbage collector may call its `put` in the middle of another `put`.
        self._queue: queue.SimpleQueue[Callable[[], Report] | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._held: Callable[[], Report] | None = None
        self._thread = threading.Thread(target=self._work, name="tapax-monitor", daemon=True)
        _unfinished.add(self)
        # The function registered last runs first: before JAX and the packages of sinks shut down.
        atexit.unregister(_finish)
        atexit.register(_finish)
        self._thread.start()

    def put(self, fetch: Callable[[], Report]) -> None:
        """Queue a report for delivery, and return at once."""
        self._queue.put(fetch)

    def hold(self, fetch: Callable[[], Report]) -> None:
        """Keep a report, which may still change, until `release` or `end`."""
        self.release()
        self._held = fetch

    def release(self) -> None:
        """Queue the report that `hold` kept, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            self.put(held)

    def wait(self, seconds: float) -> None:
        """Wait until all queued reports are delivered, but at most `seconds`."""
        delivered = threading.Event()
        self._queue.put(delivered)
        if threading.current_thread() is self._thread:
            return
        until = time.monotonic() + seconds
        while not delivered.wait(0.05) and self._thread.is_alive() and time.monotonic() < until:
            pass

    def end(self) -> None:
        """Have the thread close the sinks after all reports so far, and return at once."""
        self.release()
        self._queue.put(None)

    def close(self) -> None:
        """Close the sinks after all reports so far, and wait until they are closed."""
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        failed = False
        while (fetch := self._queue.get()) is not None:
            if isinstance(fetch, threading.Event):
                fetch.set()
                continue
            try:
                found = fetch()
            except BaseException as error:
                self._on_error()
                if not failed:
                    warn(f"The monitor is off, and the training goes on: {_shown(error)}")
                failed = True
            else:
                self._deliver(found)
            # Drop both references, so that the thread keeps no arrays alive while it waits.
            del fetch
            found = None
        for sink in self._sinks:
            self._try(sink, "close")
        _unfinished.discard(self)

    def _deliver(self, found: Report) -> None:
        # Not in `__init__`: a monitor may be older than the call of jax.distributed.initialize.
        if jax.process_index() and not self._every_process:
            return
        if found.flow is not self._flow and found.flow is not None:
            self._flow = found.flow
            self._deliver_flow(found.flow)
        for sink in list(self._sinks):
            if self._try(sink, "", found.step, found.record):
                for event in found.alerts:
                    if not self._try(sink, "alert", event):
                        break

    def _deliver_flow(self, lazy: LazyFlow) -> None:
        """Pass the flow between sites to the logs and pages among the sinks, once for a program."""
        sinks = [sink for sink in self._sinks if hasattr(type(sink), "_write_flow")]
        if not sinks:
            return
        try:
            flow = lazy.get()
        except Exception as error:
            warn(f"The log has no flow of data between sites: {_shown(error)}")
            return
        for sink in sinks:
            self._try(sink, "_write_flow", flow)

    def _try(self, sink: Any, method: str, *args: Any) -> bool:
        """Call a sink or one of its optional methods; return False if the sink is dropped."""
        call = getattr(sink, method, None) if method else sink
        try:
            if call is not None:
                call(*args)
            return True
        except BaseException as error:
            self._sinks = [other for other in self._sinks if other is not sink]
            warn(
                f"The sink {_name(sink)} failed, so the monitor sends it no more records. The "
                "training goes on, and the records written so far stay. The error: "
                f"{_shown(error)}"
            )
        if method != "close":
            with contextlib.suppress(BaseException):
                sink.close()
        return False


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn; where warnings are errors, print, because nothing on the thread would catch one."""
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
