"""Arrays of a dataset that read their rows from disk when they are indexed."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from tapax.data._shard_format import dtype_of, row_key

if TYPE_CHECKING:
    from tapax.data._manifest import DatasetArray
    from tapax.data._shard_set import ShardSet

_ALIGNMENT = 64
"""The number of bytes of which JAX wants addresses to be multiples."""


class LazyArray:
    """The rows of one site or column: an array on disk, of shape [rows, ...].

    Indexing reads rows: `array[5]`, `array[10:20]`, `array[[3, 17, 5]]`, `array[mask]`. After a
    comma, any index of NumPy applies within the rows: `array[:100, 0]`. A slice within one shard is
    a view of the file, which takes no memory; any other index makes a copy. `np.asarray(array)`
    reads the whole array, and so do `array == x` and `array != x`, which compare its elements.
    `name`, `shape` and `dtype` describe it. A pickled array contains no rows.

    Args:
        array: The entry of the site or column in the manifest.
        shards: The shards that contain the rows.

    Example:
        >>> import tempfile, jax.numpy as jnp, tapax
        >>> double = lambda x: tapax.sow(2 * x, "h")
        >>> acts = tapax.harvest(double, [jnp.ones((8, 3))], to=tempfile.mkdtemp())
        >>> array = acts["h"]
        >>> array
        LazyArray('h', shape=(8, 3), dtype=float32)
        >>> array.ndim, array.size, array.nbytes
        (2, 24, 96)
        >>> array[[0, 7], 1].tolist()
        [2.0, 2.0]
    """

    def __init__(self, array: DatasetArray, shards: ShardSet):
        self.name = array.name
        self.dtype = dtype_of(array.dtype)
        self.shape = (shards.rows, *array.shape)
        self._shards = shards
        self._key = row_key(array.name)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of all rows, in bytes."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        given: list[Any] = list(index or [Ellipsis]) if isinstance(index, tuple) else [index]
        first, *others = given
        if first is Ellipsis:
            first, others = slice(None), [Ellipsis, *others]
        if isinstance(first, slice):
            start, stop, step = first.indices(len(self))
            if step == 1:
                found = self._slice(start, max(start, stop))
            else:
                found = self.take(np.arange(start, stop, step))
            return found[(slice(None), *others)] if others else found
        if isinstance(first, (bool, np.bool_)) or first is None:
            raise IndexError(f"The rows of {self.name!r} cannot be indexed with {first!r}.")
        numbers = np.asarray(first)
        if numbers.ndim == 0:
            number = operator.index(first)
            if not -len(self) <= number < len(self):
                raise IndexError(
                    f"{self.name!r} has {len(self)} rows, so there is no row {number}."
                )
            number %= len(self)
            found = self._slice(number, number + 1)[0]
            return found[tuple(others)] if others else found
        found = self.take(numbers)
        # As in NumPy, lists for several axes are paired.
        return found[(np.arange(len(found)), *others)] if others else found

    # A comparison by identity would give False in place of a mask of rows, without an error.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == other

    def __ne__(self, other: object) -> Any:
        return np.asarray(self) != other

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                f"Reading {self.name!r} from disk always makes a copy. Leave `copy=False` out."
            )
        found = np.array(self._slice(0, len(self)))
        return found if dtype is None else found.astype(dtype)

    def __repr__(self) -> str:
        return f"LazyArray({self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Read the rows with the given numbers.

        Args:
            numbers: The numbers of rows, in any order: an array of integers, of which negative ones
                count from the end; or a mask of all rows.

        Returns:
            A copy of the rows, in the order of `numbers`.

        Raises:
            IndexError: If `numbers` names a row that does not exist.
            ShardError: If a shard is missing or was altered.

        Example:
            >>> import tempfile, jax.numpy as jnp, numpy as np, tapax
            >>> same = lambda x: tapax.sow(x, "h")
            >>> acts = tapax.harvest(same, [jnp.eye(3)], to=tempfile.mkdtemp())
            >>> acts["h"].take(np.array([2, 0])).tolist()
            [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
        """
        numbers = self._shards.row_numbers(numbers)
        is_sorted = len(numbers) < 2 or bool((numbers[1:] >= numbers[:-1]).all())
        order = None if is_sorted else np.argsort(numbers, kind="stable")
        ordered = numbers if order is None else numbers[order]
        out = _empty_aligned((len(numbers), *self.shape[1:]), self.dtype)
        self._shards.take(self._key, ordered, out)
        if order is None:
            return out
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return out[back]

    def _slice(self, start: int, stop: int) -> np.ndarray:
        parts = self._shards.slices(self._key, start, stop)
        if len(parts) == 1:
            return parts[0]
        empty = np.empty((0, *self.shape[1:]), self.dtype)
        return np.concatenate([empty, *parts])


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Make an array at an address that lets JAX use it on a CPU without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
