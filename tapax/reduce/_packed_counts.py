"""Counts of elements in bins, in one pass over a value and without a scatter.

Each element adds one to a count. Four counts of eight bits share a word, and the words of a group
of elements, too few to overflow a count, are summed in one reduction. The counts of the groups are
then summed as numbers. Integers may be added in any order, so the compiler makes vectors of it.

A group lies along one axis of the value, which keeps its other axes: a value that is divided over
the devices of a mesh stays where it is.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax import _jax
from tapax._jax import Value
from tapax.reduce._sums import COUNT

MOST_BINS = 64
"""With more bins than this, an element takes too many operations."""

_FIELDS, _BITS = 4, 8
_GROUP = 128
"""The most elements in a group."""

_LEAST_GROUP = 16
"""In smaller groups than this, the second sum would be the larger part of the work."""


def count_places(places: Value, bins: int) -> Any:
    """Counts how often each bin is named by `places`, of uint32; from `bins` on, none is."""
    one = np.uint32(1) << (places % np.uint32(_FIELDS) * np.uint32(_BITS))
    word = places // np.uint32(_FIELDS)
    words = [jnp.where(word == k, one, np.uint32(0)) for k in map(np.uint32, _words(bins))]
    return _sum_words(words, bins)


def count_true(masks: Sequence[Value]) -> Any:
    """Counts where each of the masks is true."""
    words: list[Any] = []
    for k in _words(len(masks)):
        some = enumerate(masks[_FIELDS * k : _FIELDS * (k + 1)])
        first, *more = (jnp.where(m, np.uint32(1 << _BITS * i), np.uint32(0)) for i, m in some)
        words.append(sum(more, first))
    return _sum_words(words, len(masks))


def _words(bins: int) -> range:
    return range(math.ceil(bins / _FIELDS))


def _sum_words(words: Sequence[Value], bins: int) -> Any:
    """Sums packed counts: within groups as words, then those of the groups as numbers."""
    axis, size = _group(words[0])
    grouped = [_grouped(word, axis, size) for word in words]
    zero = _jax.with_varying(jnp.zeros((), COUNT), _jax.varying_axes(jax.typeof(words[0])))
    sums = lax.reduce(grouped, [zero] * len(words), _add, (axis + 1,))
    shifts = np.arange(0, _FIELDS * _BITS, _BITS, dtype=np.uint32)
    fields = jnp.stack(sums)[:, None] >> shifts.reshape(1, -1, *[1] * sums[0].ndim)
    counts = (fields & np.uint32(2**_BITS - 1)).sum(range(2, fields.ndim), dtype=COUNT)
    return counts.ravel()[:bins]


def _add(a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _group(x: Value) -> tuple[int, int]:
    """The axis along which elements are grouped, and the size of a group.

    It is the first axis of the flat value, filled up with zeros, where no axis can be split.
    """
    spec = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)
    sizes = [_divisor(n) if part is None else 1 for n, part in zip(x.shape, spec, strict=False)]
    largest = max(sizes, default=1)
    if largest < min(_LEAST_GROUP, x.size):
        return 0, _GROUP
    return x.ndim - 1 - sizes[::-1].index(largest) if sizes else 0, largest


def _divisor(n: int) -> int:
    """The largest size of a group that divides an axis."""
    return next((g for g in range(min(n, _GROUP), 0, -1) if n % g == 0), 1)


def _grouped(x: Value, axis: int, size: int) -> Any:
    """The value with an axis of groups, and then one of the elements of each."""
    if not x.ndim or x.shape[axis] % size:
        x = _jax.whole(x).ravel()
        x = jnp.pad(x, (0, -x.size % size))
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
