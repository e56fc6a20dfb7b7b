"""Columns, small arrays with a value for every row, and the masks of the rows to keep.

Every dataset has the columns `batch`, the number of the batch, and `example`, the number of the
example within the batch. If an example has several rows, `position` numbers these rows. If the
batch has a token for each row, `token` is that column. The argument `beside` of `harvest` adds
columns, or replaces some of these.

>>> import numpy as np
>>> tokens = np.array([[5, 6, 7], [8, 9, 10]])
>>> found = make_columns(tokens, 4, (2, 3))
>>> for name, column in found.items():
...     print(name, column.tolist())
batch [4, 4, 4, 4, 4, 4]
example [0, 0, 0, 1, 1, 1]
position [0, 1, 2, 0, 1, 2]
token [5, 6, 7, 8, 9, 10]
"""

import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._frameworks.interface import key_path
from tapax._jax import PyTree, Value
from tapax._sites import wrong_type
from tapax.data._shard_format import check_storable

_TOKENS = ("tokens", "token", "input_ids")
"""The keys under which a batch may have its tokens."""

_OTHERS = ("mask", "label", "target", "position", "segment", "type")
"""The parts of names of integers for each row that are not tokens."""

Keep = Callable[[PyTree], Value] | Value | None
Beside = Callable[[PyTree], Mapping[str, Value]] | None


def make_columns(
    batch: PyTree,
    number: int,
    sizes: tuple[int, ...],
    beside: Beside = None,
    *,
    is_transposed: bool = False,
) -> dict[str, np.ndarray]:
    """Make the columns of a batch, for all rows; `sizes` are the sizes of the row axes.

    If the axes of rows have another order than in the value (`is_transposed`), the tokens in the
    batch may be in either order, so there is no column of tokens.
    """
    rows, per_example = math.prod(sizes), math.prod(sizes[1:])
    columns = {
        "batch": np.full(rows, number, np.int64),
        "example": np.repeat(np.arange(sizes[0], dtype=np.int32), per_example),
    }
    if len(sizes) > 1:
        columns["position"] = np.tile(np.arange(per_example, dtype=np.int32), sizes[0])
    tokens = None if is_transposed else _find_tokens(batch, sizes)
    if tokens is not None:
        columns["token"] = np.asarray(tokens).reshape(rows)
    if beside is not None:
        if not callable(beside):
            raise wrong_type("`beside` takes a function of a batch, but is", beside)
        given = beside(batch)
        if not isinstance(given, Mapping):
            raise wrong_type("`beside` should return a dict of arrays by name, but returned", given)
        for name, x in given.items():
            if not isinstance(name, str):
                raise wrong_type("The names of the columns of `beside` are strings, not", name)
            columns[name] = _spread(np.asarray(x), sizes, f"The column {name!r} of `beside`")
    for name, x in columns.items():
        check_storable(x.dtype, f"The column {name!r}")
    return {name: with_native_bytes(x) for name, x in columns.items()}


def with_native_bytes(x: np.ndarray) -> np.ndarray:
    """Convert an array to the byte order of this machine, as JAX and shards need it."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def read_mask(batch: PyTree, keep: Keep) -> np.ndarray | None:
    """Return the mask of the rows of a batch to keep, or None to keep all rows."""
    if keep is None:
        return None
    mask = np.asarray(keep(batch) if callable(keep) else keep)
    if mask.dtype != bool:
        raise TypeError(
            f"`keep` should give booleans, True for each row to keep, but gave an array of type "
            f"{mask.dtype}. Compare it with 0: mask != 0."
        )
    return mask


def spread_mask(mask: Value, sizes: tuple[int, ...], xp: ModuleType) -> Value:
    """Repeat a mask to one boolean for each row; `xp` is NumPy or `jax.numpy`."""
    if mask.ndim > len(sizes):
        raise ValueError(
            f"The mask of `keep` has the shape {list(mask.shape)}, but rows have the axes "
            f"{list(sizes)}: it needs one boolean for each row."
        )
    return _spread(mask, sizes, "The mask of `keep`", xp)


def _spread(x: Any, sizes: tuple[int, ...], what: str, xp: ModuleType = np) -> Any:
    """Repeat the entries of `x` to one for each row; `x` begins with all or some row axes."""
    shared = min(x.ndim, len(sizes))
    if not shared or x.shape[:shared] != sizes[:shared]:
        fitting = " or ".join(str(list(sizes[: n + 1])) for n in range(len(sizes)))
        raise ValueError(
            f"{what} has the shape {list(x.shape)}, but rows have the axes {list(sizes)}: its "
            f"first axes must be {fitting}."
            + (
                f" To store an array for each example, repeat it for its {math.prod(sizes[1:])} "
                "rows."
                if x.ndim > 1 and x.shape[:1] == sizes[:1]
                else ""
            )
        )
    entries = x.reshape(math.prod(sizes[:shared]), *x.shape[shared:])
    return xp.repeat(entries, math.prod(sizes[shared:]), axis=0) if shared < len(sizes) else entries


def _find_tokens(batch: PyTree, sizes: tuple[int, ...]) -> Value | None:
    if isinstance(batch, Mapping):
        for key in _TOKENS:
            if key in batch and _are_tokens(batch[key], sizes):
                return batch[key]
    named = jax.tree_util.tree_flatten_with_path(batch)[0]
    found = [
        x
        for keys, x in named
        if _are_tokens(x, sizes) and not any(word in key_path(keys).lower() for word in _OTHERS)
    ]
    # An integer for each example is more often a label than a token.
    return found[0] if len(found) == 1 and (len(sizes) > 1 or found[0] is batch) else None


def _are_tokens(x: Value, sizes: tuple[int, ...]) -> bool:
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    is_integer = dtype is not None and jnp.issubdtype(dtype, np.integer)
    return is_integer and shape == sizes
