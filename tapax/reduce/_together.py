"""The statistics of a value that one read computes together.

Counts by exponent, the ends, and the count of numbers that are not finite are integers, so one
reduction can compute them. On a GPU a kernel computes them together with the sums of squares.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax._jax import Value, for_gpu
from tapax.reduce import _gpu_kernel
from tapax.reduce._gpu_kernel import Statistics
from tapax.reduce._packed_counts import count_with_ends
from tapax.reduce._reducer import Reducer
from tapax.reduce._sketches import exponent_places
from tapax.reduce._sums import COUNT, scales, wide


def see_together(reducers: Iterable[Reducer], x: Value) -> dict[Reducer, Any]:
    """Compute the states of reducers that can read `x` together; empty if no kernel fits `x`."""
    known = tuple(dict.fromkeys(r for r in reducers if r.quantity is not None))
    exponents = [r for r in known if r.quantity == "exponents"]
    if len(exponents) != 1 or not _gpu_kernel.is_for(x, _powers(exponents[0])):
        return {}
    states = _seeing_once(known)(x)
    return dict(zip(known, states, strict=True))


def _powers(reducer: Reducer) -> tuple[int, int]:
    """Return the powers of two between which a reducer counts."""
    assert reducer.edges is not None
    low, high = (math.frexp(edge)[1] - 1 for edge in (reducer.edges[1], reducer.edges[-2]))
    return low, high


@functools.lru_cache(maxsize=256)
def _seeing_once(reducers: tuple[Reducer, ...]) -> Callable[[Value], Any]:
    def see(x: Value) -> Any:
        structure = jax.tree.structure([r.start(x) for r in reducers])
        return structure.unflatten(_see(x, reducers=reducers))

    return jax.jit(see)


def _see_plainly(x: Value, *, reducers: Sequence[Reducer]) -> list[Value]:
    others = {r.quantity for r in reducers} & {"ends", "nonfinite"}
    if not others:
        return jax.tree.leaves([r.see(x) for r in reducers])
    low, high = next(_powers(r) for r in reducers if r.quantity == "exponents")
    number = wide(x)
    places = exponent_places(jnp.abs(number), low, high)
    counts, nonfinite, ends = count_with_ends(places, high - low + 2, ~jnp.isfinite(number), x)
    found = Statistics(counts, nonfinite, ends=ends)
    size = jnp.asarray(x.size, COUNT)
    # XLA compiles sums of numbers to a separate function, which no other reduction can join.
    states = [
        r.see(x) if r.quantity == "squares" else _STATES[r.quantity or ""](found, size, x.dtype)
        for r in reducers
    ]
    return jax.tree.leaves(states)


def _see_by_kernel(x: Value, *, reducers: Sequence[Reducer]) -> list[Value]:
    powers = next(_powers(r) for r in reducers if r.quantity == "exponents")
    found = _gpu_kernel.run(x, powers, scales(jnp.float32), only_counts=len(reducers) == 1)
    size = jnp.asarray(x.size, COUNT)
    return jax.tree.leaves([_STATES[r.quantity or ""](found, size, x.dtype) for r in reducers])


_see = for_gpu("see_together", _see_plainly, _see_by_kernel, on_one_device=True)


def _ends(found: Statistics, size: Value, dtype: Any) -> Any:
    del size
    return tuple(end.astype(dtype) for end in found.ends)


_STATES: dict[str, Callable[[Statistics, Value, Any], Any]] = {
    "squares": lambda found, size, dtype: (*found.squares, size),
    "nonfinite": lambda found, size, dtype: (found.nonfinite, size),
    "ends": _ends,
    "exponents": lambda found, size, dtype: found.counts,
}
"""Functions that make the state of a reducer from the statistics, by its quantity."""
