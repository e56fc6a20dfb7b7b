"""Reductions of small groups of elements, of which compilers make vectors.

A group lies along one axis of the value, which keeps its other axes: a value that is divided over
the devices of a mesh stays where it is.
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
"""In smaller groups than this, what follows for each group would be most of the work."""

_PARTS = 16
"""An axis has at least so many groups if it can: over as many devices, it is divided by groups."""

Combine = Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]]


def reduce_groups(
    values: Sequence[Value], neutral: Sequence[np.generic], combine: Combine
) -> list[Any]:
    """Reduces values of one shape by groups, all of them in one reduction.

    `neutral` changes nothing that it is combined with.
    """
    axis, size = _group(values[0])
    both = list(zip(values, neutral, strict=True))
    grouped = [_grouped(x, axis, size, fill) for x, fill in both]
    varying = _jax.varying_axes(jax.typeof(values[0]))
    start = [_jax.with_varying(jnp.asarray(fill), varying) for _, fill in both]
    return list(lax.reduce(grouped, start, combine, (axis + 1,)))


def _group(x: Value) -> tuple[int, int]:
    """The axis along which elements are grouped, and the size of a group.

    It is the first axis of the flat value, filled up, where no axis can be split.
    """
    spec = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)
    sizes = [_divisor(n) if part is None else 1 for n, part in zip(x.shape, spec, strict=False)]
    largest = max(sizes, default=1)
    if largest < min(_LEAST, x.size):
        return 0, MOST
    return x.ndim - 1 - sizes[::-1].index(largest) if sizes else 0, largest


def _divisor(n: int) -> int:
    """The largest size of a group that divides an axis into enough groups."""
    most = min(n, MOST, max(n // _PARTS, _LEAST))
    return next((g for g in range(most, 0, -1) if n % g == 0), 1)


def _grouped(x: Value, axis: int, size: int, fill: np.generic) -> Any:
    """The value with an axis of groups, and then one of the elements of each."""
    if not x.ndim or x.shape[axis] % size:
        x = _jax.whole(x).ravel()
        x = jnp.pad(x, (0, -x.size % size), constant_values=fill)
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
