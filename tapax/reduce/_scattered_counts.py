"""Counts of elements in many bins, by a scatter.

The threads of a GPU that add to one count wait for each other, and the values of a layer fall into
few bins. So on a GPU neighbours add to different copies of the counts, which are summed at the end.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tapax import _jax
from tapax._jax import Value
from tapax.reduce._sums import COUNT

COPIES = 256
"""The number of copies of the counts on a GPU."""

_FEW = 2**16
"""The number of elements below which the copies take longer than the counting."""


def count_many(places: Value, bins: int) -> Any:
    """Count the elements of `places`, of int32, that name each bin; ignore `bins` and above."""
    return _bind_count(places, bins=bins)[0]


def count_by_scatter(places: Value, *, bins: int) -> list[Any]:
    return [jnp.zeros(bins, COUNT).at[places].add(np.uint32(1), mode="drop")]


def count_in_copies(places: Value, *, bins: int, copies: int = COPIES) -> list[Any]:
    if places.size < _FEW:
        return count_by_scatter(places, bins=bins)
    places = places.ravel()
    copy = jnp.arange(places.size, dtype=jnp.int32) % np.int32(copies)
    counts = jnp.zeros((copies, bins), COUNT)
    return [counts.at[copy, places].add(np.uint32(1), mode="drop").sum(0, dtype=COUNT)]


# Several devices would have to sum their copies across devices.
_bind_count = _jax.for_gpu("count_many", count_by_scatter, count_in_copies, on_one_device=True)
