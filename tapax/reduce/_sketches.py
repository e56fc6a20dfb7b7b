"""Distributions in a state of a fixed size: histograms, and the sketch for quantiles."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax._jax import PyTree, Value, whole
from tapax.reduce._packed_counts import MOST_BINS, count_places, count_true
from tapax.reduce._reducer import DirectState
from tapax.reduce._samples import take_sample
from tapax.reduce._scattered_counts import count_many
from tapax.reduce._sums import COUNT, add, add_all, as_integers, count, wide


def histogram_of(
    edges: tuple[float, ...], powers: tuple[int, int] | None, each: int, seed: int
) -> dict[str, Any]:
    """Make the functions of a reducer that counts values between edges, or magnitudes.

    Magnitudes are counted between powers of two, from `powers[0]` to `powers[1]`. The functions
    count one of `each` neighbours, at places that `seed` decides.
    """

    def see(x: Value) -> Any:
        x = take_sample(x, each, seed)
        if powers is None:
            return _count_between(edges, wide(x))
        magnitude = _magnitude(wide(x))
        if jnp.issubdtype(magnitude.dtype, jnp.floating) and len(edges) <= MOST_BINS:
            return count_exponents(magnitude, *powers)
        return _count_between(edges, magnitude)

    def init(x: Value) -> Any:
        del x
        return jnp.zeros(len(edges) - 1, COUNT)

    def update(state: Value, x: Value) -> Any:
        return add(state, see(x))

    return {
        "init": init,
        "update": update,
        "direct": DirectState(init, update, see),
        "combine": add,
        "merge": add_all,
        "finish": as_integers,
    }


def _count_between(edges: tuple[float, ...], x: Value) -> Any:
    # Comparing each value with every edge needs neither a search for the bin nor a scatter.
    lower, possible = _at_least(edges[:-1], x.dtype)
    (upper,), (some,) = _at_least([math.nextafter(edges[-1], math.inf)], x.dtype)
    if len(edges) > MOST_BINS:
        x = whole(x).ravel()
        above = count((x[:, None] >= lower) & possible, (0,))
        beyond = count((x >= upper) & (some and edges[-1] < math.inf))
        return above - jnp.append(above[1:], beyond)
    all_edges = [*zip(lower, possible, strict=True), (upper, some and edges[-1] < math.inf)]
    above = count_true([(x >= edge) & can_be for edge, can_be in all_edges])
    return above[:-1] - above[1:]


def count_exponents(x: Value, low: int, high: int) -> Any:
    """Count non-negative numbers below 2^low, between powers of two, and from 2^high on."""
    return count_places(exponent_places(x, low, high), high - low + 2)


def exponent_places(x: Value, low: int, high: int) -> Any:
    """Compute the bins of non-negative numbers for `count_exponents`; NaN comes after all bins."""
    info = jnp.finfo(x.dtype)
    unsigned = jnp.dtype(f"uint{info.bits}")
    bits = lax.bitcast_convert_type(x, unsigned)
    last = high - low + 1
    exponent = (bits >> unsigned.type(info.nmant)).astype(jnp.int32)
    place = jnp.clip(exponent + np.int32(info.minexp - low), 0, last)
    # The exponent bits of zero and of infinity do not encode a power of two.
    if low < info.minexp:
        place = jnp.where(exponent == 0, 0, place)
    if high > info.maxexp:
        place = jnp.where(x == jnp.inf, last, place)
    return jnp.where(jnp.isnan(x), last + 1, place).astype(jnp.uint32)


def _magnitude(x: Value) -> Any:
    # The magnitude of the smallest integer does not fit into its signed type.
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    return jnp.abs(x).astype(f"uint{8 * x.dtype.itemsize}") if signed else jnp.abs(x)


def _at_least(edges: Sequence[float], dtype: Any) -> tuple[Any, Any]:
    """Return the smallest numbers of a dtype that are not below `edges`, and whether they exist.

    The dtype may not have the edges themselves. Comparing values with the returned numbers gives
    the result of comparing them with the edges.
    """
    exact = np.asarray(edges, np.float64)
    if np.issubdtype(dtype, np.integer):
        low, high = (float(x) for x in (np.iinfo(dtype).min, np.iinfo(dtype).max))
        possible = np.ceil(exact) <= high
        return np.where(possible, np.clip(np.ceil(exact), low, high), low).astype(dtype), possible
    with np.errstate(over="ignore"):
        near = exact.astype(dtype)
    up = np.nextafter(near, dtype.type(np.inf))
    found = np.where(near.astype(np.float64) < exact, up, near)
    # Processors may treat subnormal numbers as zero, which is below the edge.
    least = np.finfo(dtype).smallest_normal
    return np.where((found > 0) & (found < least), least, found), np.full(exact.shape, True)


def quantiles_of(
    ranks: tuple[float, ...], error: float, least: float, most: float, each: int, seed: int
) -> dict[str, Any]:
    """Make the functions of a reducer that estimates quantiles to a relative error.

    The state counts magnitudes in bins that grow by the factor g = (1 + error) / (1 - error): then
    the middle of a bin, 2 g^i / (g + 1), is within `error` of every number in the bin. The bins of
    negative values come first, the largest magnitude in front; then the bin of zero; then the bins
    of positive values. The first and the last bin count magnitudes beyond `most`, of which the
    state knows only the smallest and the largest element. The functions count one of `each`
    neighbours, at places that `seed` decides.
    """
    # The factor 0.99 leaves room for the rounding of logarithms.
    slack = 0.99 * error
    growth = math.log((1 + slack) / (1 - slack))
    first = math.ceil(math.log(least) / growth)
    bins = math.ceil(math.log(most) / growth) - first + 1
    middles = np.exp(growth * (first + np.arange(bins))) * (2 / (math.exp(growth) + 1))
    middles = np.concatenate([[-np.inf], -middles[::-1], [0.0], middles, [np.inf]])
    places = len(middles)

    def see(x: Value) -> Any:
        x = take_sample(x, each, seed)
        x = whole(x).astype(_float_of(x))
        magnitude = jnp.abs(x)
        place = jnp.ceil(jnp.log(jnp.maximum(magnitude, least)) / growth) - first
        place = jnp.clip(place, 0, bins - 1).astype(jnp.int32) + 1
        place = jnp.where(magnitude < least, 0, jnp.where(magnitude > most, bins + 1, place))
        place = bins + 1 + jnp.where(x < 0, -place, place)
        known = ~jnp.isnan(x)
        counts = count_many(jnp.where(known, place, places), places)
        ends = {"where": known}
        return counts, x.min(initial=jnp.inf, **ends), x.max(initial=-jnp.inf, **ends)

    def combine(a: Value, b: Value) -> Any:
        return add(a[0], b[0]), jnp.minimum(a[1], b[1]), jnp.maximum(a[2], b[2])

    def finish(state: PyTree) -> Any:
        counts, low, high = state
        below = jnp.cumsum(counts, dtype=COUNT)
        total = below[-1]
        wanted = _ranked(ranks, jnp.maximum(total, 1) - 1)
        place = jnp.minimum(jnp.searchsorted(below, wanted, side="right"), places - 1)
        found = jnp.clip(jnp.asarray(middles, low.dtype)[place], low, high)
        return jnp.where(total > 0, found, jnp.nan)

    def init(x: Value) -> Any:
        ends = (jnp.asarray(end, _float_of(x)) for end in (jnp.inf, -jnp.inf))
        return jnp.zeros(places, COUNT), *ends

    def update(state: PyTree, x: Value) -> Any:
        return combine(state, see(x))

    return {
        "init": init,
        "update": update,
        "direct": DirectState(init, update, see),
        "combine": combine,
        "merge": lambda states: (add_all(states[0]), states[1].min(0), states[2].max(0)),
        "finish": finish,
    }


def _ranked(ranks: tuple[float, ...], last: Any) -> Any:
    """Compute floor(q * last) in integers, since float32 cannot tell large ranks apart.

    With q as a multiple of 2^-32, this is the whole part of the product of two 32-bit numbers,
    computed from their halves of 16 bits. A q of 1, which is not below 2^32, is handled apart.
    """
    exact = [math.ceil(Fraction(repr(q)) * 2**32) for q in ranks]
    q = np.asarray([min(x, 2**32 - 1) for x in exact], np.uint32)
    ones = np.asarray([x == 2**32 for x in exact])
    half = np.uint32(0xFFFF)
    ql, qh, nl, nh = q & half, q >> 16, last & half, last >> 16
    middle = (ql * nl >> 16) + (qh * nl & half) + (ql * nh & half)
    whole = qh * nh + (qh * nl >> 16) + (ql * nh >> 16) + (middle >> 16)
    return jnp.where(ones, last, whole)


def _float_of(x: Value) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
