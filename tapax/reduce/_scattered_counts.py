"""Counts of elements in many bins, by a scatter.

The threads of a GPU that add to one count wait for each other, and the values of a layer are in few
bins. There neighbours add to different copies of the counts, which are summed in the end.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tapax import _jax
from tapax._jax import Value
from tapax.reduce._sums import COUNT

COPIES = 256
"""How many copies of the counts a GPU has."""

_FEW = 2**16
"""For fewer elements than this, the copies would take longer than the counting."""


def count_many(places: Value, bins: int) -> Any:
    """Counts how often each bin is named by `places`, of int32; from `bins` on, none is."""
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


# Several devices would add up the copies of each other.
_bind_count = _jax.for_gpu("count_many", count_by_scatter, count_in_copies, on_one_device=True)
