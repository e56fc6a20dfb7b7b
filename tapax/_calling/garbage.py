"""Python's garbage collector while a program is traced.

A trace makes millions of objects that live until it ends. The collector visits all living objects
each time their number has grown by a quarter, and finds nothing to free: a third of the time to
trace ten thousand sites. Its frequent collections of new objects go on.
"""

import gc
import threading
from typing import Any

_NEVER = 2**31 - 1


class _Pause:
    """A context in which Python collects only new objects; it nests, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._threshold = gc.get_threshold()[2]

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                new, survivors, full = gc.get_threshold()
                if full != _NEVER:  # other code may have restored what it read during a pause
                    self._threshold = full
                gc.set_threshold(new, survivors, _NEVER)
            self._entered += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._entered -= 1
            new, survivors, full = gc.get_threshold()
            if not self._entered and full == _NEVER:  # unless other code has changed it
                gc.set_threshold(new, survivors, self._threshold)


full_collections_paused = _Pause()
