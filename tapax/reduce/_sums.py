"""What the states of reducers are made of: sums in a type that is wide enough, and counts.

A count is an array of uint32, and stops at the largest number instead of starting from zero again.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax._jax import Value

COUNT = jnp.dtype(jnp.uint32)
_MOST = np.uint32(2**32 - 1)


def wide(x: Value) -> Any:
    """A value in the type that it is accumulated in."""
    if x.dtype.itemsize >= 4:
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float32)
    return x.astype(jnp.uint32 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else jnp.int32)


def ordered(dtype: Any) -> Any:
    """The type in which values are compared: the smallest ones have no infinity."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1
    return jnp.dtype(jnp.float32 if small else dtype)


def square(x: Value) -> Any:
    """The square of the magnitude."""
    return jnp.real(x) ** 2 + jnp.imag(x) ** 2 if jnp.iscomplexobj(x) else jnp.square(x)


def _scale(dtype: Any) -> float:
    return 2.0 ** (jnp.finfo(dtype).maxexp * 25 // 64)


def squares(x: Value) -> list[Any]:
    """The squares of the magnitudes made larger, and made smaller.

    The square of a vanishing gradient is zero, and that of an exploding one infinite, long before
    the gradient is. Between them these two have every magnitude from 1e-33 to 1e30 in float32.
    """
    # A constant that several sites share would be kept, as large as a value.
    scale = _scale(x.dtype)
    up, down = lax.optimization_barrier(np.asarray([scale, 1 / scale], x.real.dtype))
    return [square(x * up), square(x * down)]


def root(sums: Any, among: Any = 1) -> Any:
    """The root of the sum of squares, or of their mean `among` so many."""
    larger, smaller = sums
    scale = _scale(larger.dtype)
    fits = larger < 2.0 ** (jnp.finfo(larger.dtype).maxexp * 7 // 8)
    found = jnp.sqrt(jnp.where(fits, larger, smaller) / among)
    return jnp.where(fits, found / scale, found * scale)


def all_but(x: Value, axis: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The axes of a value that are reduced, where `axis` is kept."""
    kept = () if axis is None else (axis,) if isinstance(axis, int) else axis
    rank = len(x.shape)
    return tuple(a for a in range(rank) if a not in {k % rank for k in kept})


def count(mask: Value, axes: tuple[int, ...] | None = None) -> Any:
    """How many are true."""
    return mask.sum(axes, dtype=COUNT)


def size(x: Value, axes: tuple[int, ...]) -> Any:
    """How many elements there are along some axes."""
    return jnp.asarray(min(math.prod(x.shape[a] for a in axes), int(_MOST)), COUNT)


def add(a: Value, b: Value) -> Any:
    """The sum of two states."""

    def one(x: Value, y: Value) -> Any:
        both = x + y
        return jnp.where(both < x, _MOST, both) if x.dtype == COUNT else both

    return jax.tree.map(one, a, b)


def add_all(states: Any) -> Any:
    """The sum of states that lie along the first axis."""

    def one(x: Value) -> Any:
        total = x.sum(0, dtype=x.dtype)
        if x.dtype != COUNT:
            return total
        return jnp.where(x.sum(0, dtype=jnp.float32) >= 2.0**32, _MOST, total)

    return jax.tree.map(one, states)


def as_integers(counts: Any) -> Any:
    """Counts as the integers that people compute with."""
    return jnp.minimum(counts, jnp.asarray(2**31 - 1, COUNT)).astype(jnp.int32)


def extremes(dtype: Any) -> tuple[Any, Any]:
    """The smallest and the largest number of a type."""
    if jnp.issubdtype(dtype, jnp.floating):
        ends = -np.inf, np.inf
    elif jnp.issubdtype(dtype, jnp.bool_):
        ends = False, True
    else:
        ends = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return np.asarray(ends[0], dtype), np.asarray(ends[1], dtype)
