"""Python's garbage collector while a program is traced.

A trace makes millions of objects that live until it ends. The collector visits all living objects
each time their number has grown by a quarter, and finds nothing to free: a third of the time to
trace ten thousand sites. Its frequent collections of new objects go on.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

_NEVER = 2**31 - 1

_lock = threading.Lock()
_pauses = 0
_threshold = 0


@contextlib.contextmanager
def full_collections_paused() -> Iterator[None]:
    """Let Python collect only new objects while the block runs; blocks nest, in any thread."""
    global _pauses, _threshold
    with _lock:
        if not _pauses:
            *others, _threshold = gc.get_threshold()
            gc.set_threshold(*others, _NEVER)
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            *others, now = gc.get_threshold()
            if not _pauses and now == _NEVER:  # unless other code has set it meanwhile
                gc.set_threshold(*others, _threshold)
