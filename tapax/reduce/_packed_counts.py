"""Counts of elements in bins, in one pass over a value and without a scatter.

Each element adds one to a count. Four counts of eight bits share a word. One reduction sums the
words of each group of elements, which is too small to overflow a count; then the counts of the
groups are unpacked and summed. Integers may be added in any order, so the compiler can vectorize
the sum.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tapax._jax import Value
from tapax.reduce._groups import reduce_groups
from tapax.reduce._sums import COUNT, decode_order, encode_order

MOST_BINS = 64
"""The number of bins above which an element takes too many operations."""

_FIELDS, _BITS = 4, 8


def count_places(places: Value, bins: int) -> Any:
    """Count the elements of `places`, of uint32, that name each bin; ignore `bins` and above."""
    return _sum_words(_place_words(places, bins), bins)


def count_true(masks: Sequence[Value]) -> Any:
    """Count the true elements of each mask."""
    return _sum_words(_mask_words(masks), len(masks))


def count_with_ends(places: Value, bins: int, mask: Value, x: Value) -> tuple[Any, Any, Any]:
    """Count `places` and the true elements of `mask`, and find the ends of `x`, all at once."""
    words = [*_place_words(places, bins), *_mask_words([mask])]
    (low, high), limits = encode_order(x)
    zero = np.uint32(0)

    def combine(a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
        ends = [jnp.minimum(a[-2], b[-2]), jnp.maximum(a[-1], b[-1])]
        return [*_add(a[:-2], b[:-2]), *ends]

    found = reduce_groups([*words, low, high], [*[zero] * len(words), *limits], combine)
    counts = _sum_fields(found[:-2])
    ends = decode_order(found[-2].min(), x.dtype), decode_order(found[-1].max(), x.dtype)
    return counts[:bins], counts[_FIELDS * (len(words) - 1)], ends


def _place_words(places: Value, bins: int) -> list[Any]:
    one = np.uint32(1) << (places % np.uint32(_FIELDS) * np.uint32(_BITS))
    word = places // np.uint32(_FIELDS)
    return [jnp.where(word == k, one, np.uint32(0)) for k in map(np.uint32, _words(bins))]


def _mask_words(masks: Sequence[Value]) -> list[Any]:
    words: list[Any] = []
    for k in _words(len(masks)):
        some = enumerate(masks[_FIELDS * k : _FIELDS * (k + 1)])
        first, *more = (jnp.where(m, np.uint32(1 << _BITS * i), np.uint32(0)) for i, m in some)
        words.append(sum(more, first))
    return words


def _words(bins: int) -> range:
    return range(math.ceil(bins / _FIELDS))


def _sum_words(words: Sequence[Value], bins: int) -> Any:
    return _sum_fields(reduce_groups(words, [np.uint32(0)] * len(words), _add))[:bins]


def _sum_fields(sums: Sequence[Value]) -> Any:
    """Unpack the counts of the groups, and sum them."""
    shifts = np.arange(0, _FIELDS * _BITS, _BITS, dtype=np.uint32)
    fields = jnp.stack(sums)[:, None] >> shifts.reshape(1, -1, *[1] * sums[0].ndim)
    return (fields & np.uint32(2**_BITS - 1)).sum(range(2, fields.ndim), dtype=COUNT).ravel()


def _add(a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    return [x + y for x, y in zip(a, b, strict=True)]
