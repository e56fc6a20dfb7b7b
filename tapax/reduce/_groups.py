"""Reductions of small groups of elements, which compilers vectorize.

A group consists of neighbours along one axis of the value. The other axes stay as they are, so that
a value divided over the devices of a mesh does not move.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax import _jax
from tapax._jax import Value

MOST = 128
"""The most elements in a group."""

_LEAST = 16
"""The fewest elements in a group: if smaller, the work after the reduction would dominate."""

_PARTS = 16
"""The fewest groups along an axis, if its size allows: as many devices can then divide it."""

Combine = Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]]


def reduce_groups(
    values: Sequence[Value], neutral: Sequence[np.generic], combine: Combine
) -> list[Any]:
    """Reduce each group of values of one shape, all values in one reduction.

    `neutral` has the neutral element of `combine` for each value.
    """
    axis, size = _group(values[0])
    both = list(zip(values, neutral, strict=True))
    grouped = [_grouped(x, axis, size, fill) for x, fill in both]
    varying = _jax.varying_axes(jax.typeof(values[0]))
    start = [_jax.with_varying(jnp.asarray(fill), varying) for _, fill in both]
    return list(lax.reduce(grouped, start, combine, (axis + 1,)))


def _group(x: Value) -> tuple[int, int]:
    """Choose the axis along which to group elements, and the size of a group.

    If no axis can be split, return axis 0 of the flat value, which `_grouped` then pads.
    """
    spec = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)
    sizes = [_divisor(n) if part is None else 1 for n, part in zip(x.shape, spec, strict=False)]
    largest = max(sizes, default=1)
    if largest < min(_LEAST, x.size):
        return 0, MOST
    return x.ndim - 1 - sizes[::-1].index(largest) if sizes else 0, largest


def _divisor(n: int) -> int:
    """Return the largest size of a group that divides an axis of size `n` into enough groups."""
    most = min(n, MOST, max(n // _PARTS, _LEAST))
    return next((g for g in range(most, 0, -1) if n % g == 0), 1)


def _grouped(x: Value, axis: int, size: int, fill: np.generic) -> Any:
    """Split an axis of the value into an axis of groups and an axis of the elements of each."""
    if not x.ndim or x.shape[axis] % size:
        x = _jax.whole(x).ravel()
        x = jnp.pad(x, (0, -x.size % size), constant_values=fill)
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
