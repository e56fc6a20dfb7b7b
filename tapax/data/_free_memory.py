"""Memory that was freed, but that the C library keeps for later.

The arrays of a harvest are large, and several threads free them. The GNU C library then keeps as
much as a gigabyte and a half of free memory, by chance. `FreeMemory` gives it back to the operating
system, so that the memory of a harvest is bounded.
"""

import ctypes
import functools
import threading
from collections.abc import Callable

KEPT = 3 << 28
"""The number of free bytes that the C library may keep."""
_INTERVAL = 1 << 30
"""The number of bytes that a harvest frees between two looks: taking new memory costs time."""


class _Usage(ctypes.Structure):
    """The result of `mallinfo2`; `fordblks` is the number of free bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


@functools.cache
def _functions() -> tuple[Callable[[], _Usage], Callable[[int], int]] | None:
    """Return `mallinfo2` and `malloc_trim` of the GNU C library; None with another one."""
    try:
        library = ctypes.CDLL(None)
        usage, trim = library.mallinfo2, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    usage.restype = _Usage
    trim.argtypes = [ctypes.c_size_t]
    return usage, trim


def free_bytes() -> int | None:
    """Return the number of free bytes that the C library keeps; None if it does not tell."""
    found = _functions()
    return None if found is None else found[0]().fordblks


class FreeMemory:
    """The memory that a harvest frees; threads may share it."""

    def __init__(self) -> None:
        self._freed = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count freed bytes, and release free memory if the C library keeps a lot of it."""
        with self._lock:
            self._freed += nbytes
            is_due = self._freed >= _INTERVAL
            self._freed = 0 if is_due else self._freed
        kept = free_bytes() if is_due else None
        if kept is not None and kept > KEPT:
            release_free_memory()


def release_free_memory() -> None:
    """Give all free memory back to the operating system, as far as the C library can."""
    found = _functions()
    if found is not None:
        found[1](0)
