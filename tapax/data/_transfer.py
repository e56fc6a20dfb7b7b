"""From the device to the host: rows that are kept, in memory that is used again.

An NVIDIA GPU copies to pinned memory at many times the speed of other memory, once JAX has had that
memory before: JAX keeps it when an array is dropped, for the next one. NumPy arrays are made of it
by the threads that write, several at a time. On a CPU nothing is copied.

Rows are dropped on the device, before the copy. The number of rows left is rounded up to a
sixteenth of the batch, so that XLA compiles at most sixteen versions of the selection for each
shape, whatever the counts are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tapax._jax import Value

_PARTS = 16
"""Into how many parts the numbers of rows are rounded."""


def start_copies(arrays: Sequence[Value], kept: np.ndarray | None) -> list[PendingCopy]:
    """Start to copy arrays to the host; of their rows those with the numbers `kept`, or all."""
    if kept is None or not len(arrays):
        return [PendingCopy(x, None) for x in arrays]
    if any(len(x.sharding.device_set) > 1 for x in arrays):
        # To select rows that are divided over devices would move them between the devices.
        return [PendingCopy(x, None, kept) for x in arrays]
    rows = arrays[0].shape[0]
    part = -(-rows // _PARTS)
    padded = np.zeros(min(-(-len(kept) // part) * part, rows), np.int32)
    padded[: len(kept)] = kept
    selected = _select_rows(list(arrays), padded)
    return [PendingCopy(x, len(kept)) for x in selected]


@jax.jit
def _select_rows(arrays: list[Value], numbers: Value) -> list[Value]:
    return [x.at[numbers].get(mode="promise_in_bounds") for x in arrays]


class PendingCopy:
    """A copy of an array to the host that has been started.

    `count` rows of it are wanted, the first ones, or those that `kept` names, or all.
    """

    def __init__(self, x: Value, count: int | None, kept: np.ndarray | None = None):
        self._count, self._kept = count, kept
        kind = _pinned_kind(x)
        if kind is None:
            x.copy_to_host_async()
        else:
            x = jax.device_put(x, x.sharding.with_memory_kind(kind))
        self._array = x

    def wait(self) -> None:
        """Wait until the rows are on the host, or as near to it as JAX lets one wait for."""
        jax.block_until_ready(self._array)

    def rows(self) -> np.ndarray:
        """Return the rows that are wanted."""
        host = np.asarray(self._array)
        return host[: self._count] if self._kept is None else host[self._kept]


def _pinned_kind(x: Value) -> str | None:
    """The kind of memory on the host that the devices of an array copy to fastest."""
    return _pinned_kind_of(next(iter(x.sharding.device_set)))


@functools.cache
def _pinned_kind_of(device: Any) -> str | None:
    if device.platform == "cpu":
        return None
    kinds = {memory.kind for memory in device.addressable_memories()}
    return "pinned_host" if "pinned_host" in kinds else None
