"""Free memory goes back to the operating system, whichever thread has freed it."""

import threading
from pathlib import Path

import numpy as np
import pytest

from tapax.data import _free_memory
from tapax.data._free_memory import KEPT, FreeMemory, free_bytes, release_free_memory

pytestmark = pytest.mark.skipif(
    free_bytes() is None or not Path("/proc/self/status").exists(), reason="needs the GNU C library"
)


def allocated_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def keep_free_memory(nbytes):
    """Free memory in small pieces, most of which the C library keeps below those that stay."""
    pieces = [np.ones(1 << 13) for _ in range(nbytes >> 16)]
    stay = pieces[::64]
    del pieces
    return stay


def test_free_memory_of_another_thread_is_released():
    stay = []
    thread = threading.Thread(target=lambda: stay.extend(keep_free_memory(1 << 29)))
    thread.start()
    thread.join()
    before, kept = allocated_bytes(), free_bytes()
    assert kept > 1 << 28
    release_free_memory()
    assert allocated_bytes() < before - (1 << 28)
    assert all(piece.sum() == piece.size for piece in stay)


@pytest.mark.parametrize(("kept", "releases"), [(KEPT, 0), (KEPT + 1, 2)])
def test_much_free_memory_is_released_once_for_each_gigabyte(kept, releases, monkeypatch):
    released = []
    monkeypatch.setattr(_free_memory, "free_bytes", lambda: kept)
    monkeypatch.setattr(_free_memory, "release_free_memory", lambda: released.append(1))
    memory = FreeMemory()
    for _ in range(11):
        memory.add(1 << 28)
    assert len(released) == releases
