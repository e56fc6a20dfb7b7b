"""Batches of a dataset on the device, which threads read ahead and may divide over a mesh."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tapax._jax import Value
from tapax._sites import wrong_type
from tapax.data._batch_order import BatchOrder
from tapax.data._lazy_array import LazyArray

_THREADS = 3
"""The number of threads that read, and of batches that they read ahead."""

Batch = dict[str, Value]


class Batches(Iterator[Batch]):
    """An iterator over batches: dicts of arrays on the device, by the names of sites and columns.

    `Activations.batches` makes it. `position` is the number of the next batch, at which
    `acts.batches(..., start=position)` continues. The length is the number of batches of the whole
    dataset.

    Args:
        arrays: The `LazyArray`s to read, by name.
        order: The order of the rows, which decides the rows of each batch.
        start: The number of the first batch.
        sharding: The sharding of each array in a batch; None for the default device.

    Example:
        >>> import tempfile, jax.numpy as jnp, tapax
        >>> double = lambda x: tapax.sow(2 * x, "h")
        >>> acts = tapax.harvest(double, [jnp.ones((8, 3))], to=tempfile.mkdtemp())
        >>> batches = acts.batches(5)
        >>> next(batches)["h"].shape, batches.position, len(batches)
        ((5, 3), 1, 2)
        >>> [batch["h"].shape for batch in acts.batches(5, start=batches.position)]
        [(3, 3)]
        >>> [batch["h"].shape for batch in batches]
        [(3, 3)]
    """

    def __init__(
        self,
        arrays: Mapping[str, LazyArray],
        order: BatchOrder,
        start: int,
        sharding: Sharding | None,
    ):
        self.position = start
        self._order = order
        self._read = _reader(arrays, order, sharding)
        self._ahead: collections.deque[Future[Batch]] = collections.deque()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tapax-reader")
        # End the threads also if the iterator is dropped before its last batch.
        weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)

    def __len__(self) -> int:
        """Return the number of batches of the whole dataset."""
        return len(self._order)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        while len(self._ahead) < _THREADS and self.position + len(self._ahead) < len(self):
            self._ahead.append(self._threads.submit(self._read, self.position + len(self._ahead)))
        if not self._ahead:
            self._threads.shutdown(wait=False)
            raise StopIteration
        try:
            batch = self._ahead[0].result()
        except Exception:
            self._ahead.clear()  # so that the next call reads this batch again
            raise
        # An interrupt while waiting leaves the batch for the next call.
        self._ahead.popleft()
        self.position += 1
        return batch


def _reader(
    arrays: Mapping[str, LazyArray], order: BatchOrder, sharding: Sharding | None
) -> Callable[[int], Batch]:
    """Make the function that reads a batch.

    It has no reference to the iterator, so that threads do not keep the iterator alive.
    """

    def read(number: int) -> Batch:
        rows = order.rows(number)
        return {name: _read_rows(array, rows, sharding) for name, array in arrays.items()}

    return read


def _read_rows(array: LazyArray, rows: np.ndarray, sharding: Sharding | None) -> Value:
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(_narrow(array, array.take(rows)), sharding)

    # Each process reads only the rows for its devices.
    def read_part(index: Any) -> np.ndarray:
        return _narrow(array, array.take(rows[index[0]]))[(slice(None), *index[1:])]

    shape = (len(rows), *array.shape[1:])
    return jax.make_array_from_callback(shape, sharding, read_part)


def _narrow(array: LazyArray, x: np.ndarray) -> np.ndarray:
    """Convert to the dtype that JAX has; raise for numbers that are too large for it."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if dtype == x.dtype or x.dtype.itemsize < 8:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = x.astype(dtype)
    is_integer = x.dtype.kind in "iu"
    if (narrow != x if is_integer else np.isfinite(x) & ~np.isfinite(narrow)).any():
        what = "integers" if is_integer else "numbers"
        raise OverflowError(
            f"{array.name!r} has {what} that need 64 bits, but JAX has 32 by default. Leave it "
            "out by `sites`, or enable 64 bits: jax.config.update('jax_enable_x64', True)."
        )
    return narrow


def make_sharding(mesh: Any, sharding: Any) -> Sharding | None:
    """Check `mesh` and `sharding`, and make a sharding of rows over all axes of `mesh`."""
    if mesh is not None and sharding is not None:
        raise ValueError("Give `mesh` or `sharding`, not both: a sharding has a mesh already.")
    if mesh is not None:
        if not isinstance(mesh, Mesh):
            raise wrong_type("`mesh` takes a jax.sharding.Mesh, but is", mesh)
        return NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    if sharding is not None and not isinstance(sharding, Sharding):
        raise wrong_type("`sharding` takes a jax.sharding.Sharding, but is", sharding)
    return sharding


def check_divisible(
    sharding: Sharding | None, size: int, arrays: Mapping[str, LazyArray], drop: bool
) -> None:
    """Raise, before anything is read, if `sharding` cannot divide a batch over the devices."""
    for name, array in arrays.items() if sharding is not None else ():
        for count in (size, len(array) % size):
            if count == size or (count and not drop):
                _check_shape(sharding, name, (count, *array.shape[1:]), is_last=count < size)


def _check_shape(sharding: Any, name: str, shape: tuple[int, ...], *, is_last: bool) -> None:
    try:
        # Only some versions of JAX raise for a specification with more axes than the array has.
        if len(spec := getattr(sharding, "spec", ())) > len(shape):
            raise ValueError(f"{spec} has {len(spec)} axes")
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as error:
        what, fix = "Batches", "Choose another `size`, or other `sites`"
        if is_last:
            what, fix = "The last batch", "Give drop_remainder=True"
        raise ValueError(
            f"{what} of {shape[0]} rows cannot be divided over the devices: {name!r} has the shape "
            f"{list(shape)}, and the sharding is {sharding} ({error}). {fix}."
        ) from error
