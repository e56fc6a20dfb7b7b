"""Statistics of how values are distributed: histograms, the largest values, quantiles."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._jax import Value, whole
from tapax.reduce._reducer import Reducer
from tapax.reduce._samples import one_in
from tapax.reduce._sketches import histogram_of, quantiles_of
from tapax.reduce._sums import extremes, ordered


def _numbers(given: Any, as_number: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """The numbers in a sequence; None if there is something else in it, or it is none."""
    if isinstance(given, (str, bytes)):
        return None
    try:
        return tuple(as_number(x) for x in given)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        return None


def histogram(
    edges: Sequence[float] | None = None,
    *,
    log2: tuple[int, int] | None = None,
    sample: float = 1,
    seed: int = 0,
) -> Reducer:
    """Counts between edges, as `numpy.histogram` has them; or of magnitudes, by powers of two.

    Every bin but the last is open on its right; what is outside of the edges, and NaN, is in none.
    With `log2=(lo, hi)` the edges are 0, 2^lo, ..., 2^hi, inf, and what is counted is `abs(x)`.

    With `sample=1/16` only one of 16 elements is counted: of 16 neighbours along the last axis but
    one, at a place that depends on `seed` and the shape alone. The counts are those of the sample.
    Tables name it `histogram(sample=1/16)`, and logs `histogram.sample16`.
    """
    if (edges is None) == (log2 is None):
        raise TypeError("`histogram` takes `edges`, or `log2=(lo, hi)`, and not both.")
    taken = one_in(sample, seed)
    if log2 is not None:
        ends = _numbers(log2, operator.index) or ()
        if len(ends) != 2 or not -1074 <= ends[0] <= ends[1] <= 1023:
            raise ValueError(
                f"`log2` must be two integers, the smaller first, but is {log2!r}: the powers of "
                "two between which magnitudes are counted."
            )
        low, high = ends
        powers = (2.0**p for p in range(low, high + 1))
        return _histogram((0.0, *powers, math.inf), (low, high), *taken)
    found = _numbers(edges, float) or ()
    if len(found) < 2 or any(not a < b for a, b in itertools.pairwise(found)):
        raise ValueError(
            f"`edges` must be two numbers or more, each larger than the one before, but is "
            f"{edges!r}. They must be known when the function is traced."
        )
    return _histogram(found, None, *taken)


@functools.lru_cache(maxsize=256)
def _histogram(
    edges: tuple[float, ...], powers: tuple[int, int] | None, each: int, seed: int
) -> Reducer:
    return Reducer(
        **histogram_of(edges, powers, each, seed),
        name="histogram",
        needs="real numbers" if powers is None else "numbers",
        edges=edges,
        one_in=each,
        # Others that see a value see all of it.
        quantity=None if powers is None or each > 1 else "exponents",
        is_builtin=True,
    )


def topk(k: int) -> Reducer:
    """The `k` largest elements, the largest first; where there are fewer, the smallest number."""
    found = None if isinstance(k, bool) else _numbers([k], operator.index)
    if found is None or found[0] < 1:
        raise ValueError(f"`topk` takes a number of elements, at least 1, but was given {k!r}.")
    return _topk(found[0])


@functools.lru_cache(maxsize=256)
def _topk(k: int) -> Reducer:
    def init(x: Value) -> Any:
        dtype = ordered(x.dtype)
        return jnp.full(k, extremes(dtype)[0], dtype)

    def largest(x: Value) -> Any:
        return jax.lax.top_k(x, k)[0]

    return Reducer(
        init=init,
        update=lambda state, x: largest(jnp.append(state, whole(x).ravel().astype(state.dtype))),
        combine=lambda a, b: largest(jnp.append(a, b)),
        merge=lambda states: largest(states.ravel()),
        name="topk",
        needs="real numbers",
        labels=tuple(f"top{i}" for i in range(k)),
        is_builtin=True,
    )


def quantiles(
    q: Sequence[float] | float = (0.05, 0.25, 0.5, 0.75, 0.95),
    *,
    error: float = 0.01,
    magnitudes: tuple[float, float] = (1e-10, 1e10),
    sample: float = 1,
    seed: int = 0,
) -> Reducer:
    """Quantiles from a sketch of a fixed size: `[..., len(q)]`.

    Each is within the relative `error` of the element of rank floor(q (n - 1)), that of
    `numpy.quantile` with `method="lower"`, if its magnitude is between `magnitudes`. Smaller ones
    are taken for zero; of larger ones only the smallest and the largest element are known. The
    state has about `log(most / least) / error` counts (DDSketch: Masson, Rim and Lee 2019).

    With `sample=1/16` they are those of one in 16 elements: see `histogram`.
    """
    ranks = _numbers(q if np.ndim(q) else [q], float)
    if not ranks or any(not 0 <= x <= 1 for x in ranks):
        raise ValueError(f"`q` must be numbers from 0 to 1, but is {q!r}.")
    errors = _numbers([error], float)
    if errors is None or not 1e-5 <= errors[0] < 1:
        raise ValueError(f"`error` must be between 1e-5 and 1, but is {error!r}.")
    ends = _numbers(magnitudes, float) or ()
    if len(ends) != 2 or not 0 < ends[0] < ends[1] < math.inf:
        raise ValueError(
            f"`magnitudes` must be two positive numbers, the smaller first, but is {magnitudes!r}."
        )
    return _quantiles(ranks, errors[0], *ends, *one_in(sample, seed))


@functools.lru_cache(maxsize=256)
def _quantiles(
    ranks: tuple[float, ...], error: float, least: float, most: float, each: int, seed: int
) -> Reducer:
    return Reducer(
        **quantiles_of(ranks, error, least, most, each, seed),
        name="quantiles",
        needs="real numbers",
        labels=tuple(f"q{x:g}" for x in ranks),
        one_in=each,
        is_builtin=True,
    )
