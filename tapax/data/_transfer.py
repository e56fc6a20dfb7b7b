"""Copies of rows from the device to the host, in memory that JAX reuses.

An NVIDIA GPU copies to pinned memory many times faster than to other memory, provided that JAX has
allocated that memory before: JAX keeps the memory of a deleted array for the next one. The writer
threads convert it to NumPy arrays, several at a time. On a CPU there is nothing to copy.

The device drops rows before the copy. The number of remaining rows is rounded up to a multiple of a
sixteenth of the batch, so that XLA compiles at most sixteen versions of the selection for each
shape, whatever the counts are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tapax._jax import PyTree, Value

_PARTS = 16
"""The number of parts of a batch to which numbers of rows are rounded."""


def start_copies(arrays: Sequence[Value], kept: np.ndarray | None) -> list[PendingCopy]:
    """Start to copy arrays to the host: the rows with the numbers `kept`, or all if it is None."""
    if kept is None or not len(arrays):
        return [PendingCopy(x, None) for x in arrays]
    if any(len(x.sharding.device_set) > 1 for x in arrays):
        # A selection of rows that are divided over devices would move rows between the devices.
        return [PendingCopy(x, None, kept) for x in arrays]
    rows = arrays[0].shape[0]
    part = max(1, -(-rows // _PARTS))
    padded = np.zeros(min(-(-len(kept) // part) * part, rows), np.int32)
    padded[: len(kept)] = kept
    selected = _select_rows(list(arrays), padded)
    return [PendingCopy(x, len(kept)) for x in selected]


def start_small_copies(tree: PyTree) -> None:
    """Start to copy small arrays to the host, where `jax.device_get` finds them.

    A GPU makes its copies in the order of these calls. A copy that starts behind the rows of later
    batches waits until the device has computed those batches.
    """
    for x in jax.tree.leaves(tree):
        if x.is_fully_addressable:
            x.copy_to_host_async()


@jax.jit
def _select_rows(arrays: list[Value], numbers: Value) -> list[Value]:
    return [x.at[numbers].get(mode="promise_in_bounds") for x in arrays]


class PendingCopy:
    """A running copy of an array to the host.

    `rows` returns the rows with the numbers `kept`, or the first `count` rows, or all rows if both
    are None.
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
        """Wait until the rows are on the host, as far as JAX can wait for a copy."""
        jax.block_until_ready(self._array)

    def rows(self) -> np.ndarray:
        """Return the chosen rows."""
        host = np.asarray(self._array)
        return host[: self._count] if self._kept is None else host[self._kept]


def _pinned_kind(x: Value) -> str | None:
    """Return the kind of host memory to which the devices of an array copy fastest."""
    return _pinned_kind_of(next(iter(x.sharding.device_set)))


@functools.cache
def _pinned_kind_of(device: Any) -> str | None:
    if device.platform == "cpu":
        return None
    kinds = {memory.kind for memory in device.addressable_memories()}
    return "pinned_host" if "pinned_host" in kinds else None
