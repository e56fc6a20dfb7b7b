"""Statistics of the distribution of values: histograms, the largest values, quantiles."""

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
    """Convert a sequence to numbers; return None if `given` is not a sequence of numbers."""
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
    """Make a reducer that counts values between edges, or magnitudes between powers of two.

    The counts are those of `numpy.histogram`: every bin except the last excludes its right edge,
    and no bin counts NaN or a value outside the edges.

    Args:
        edges: The edges of the bins, in ascending order. Pass `edges` or `log2`, not both.
        log2: Two integers from -1074 to 1023, `(lo, hi)`. The reducer then counts `abs(x)` between
            the edges 0, 2^lo, ..., 2^hi, inf.
        sample: The fraction of the elements to count, 1/n. With `sample=1/16` the reducer counts
            one of 16 neighbours along the last axis but one, at a place that depends only on `seed`
            and the shape. The counts are those of the sample, and are not scaled up. The name of
            the reducer is `histogram(sample=1/16)` in tables, and `histogram.sample16` in logs.
        seed: The seed of the sample, an integer from 0 to 2**32 - 1.

    Returns:
        A reducer with an int32 result of shape `[..., bins]`: one count for each bin, for each call
        and each iteration of a scan around the site.

    Raises:
        TypeError: If both `edges` and `log2` are given, or neither.
        ValueError: If `edges` is not two or more ascending numbers that are known when the function
            is traced, `log2` is not two integers in order, `sample` is not 1/n, or `seed` is out of
            range.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def f(x):
        ...     return tapax.sow(2 * x, "h").sum()
        >>> x = jnp.array([1.0, -2.0, 0.0, 4.0])
        >>> histogram = tapax.reduce.histogram([-4, 0, 4, 8])
        >>> tapax.capture(f, values={"h": histogram})(x)[1].values["h"].tolist()
        [1, 2, 1]
        >>> histogram = tapax.reduce.histogram(log2=(0, 3))
        >>> tapax.capture(f, values={"h": histogram})(x)[1].values["h"].tolist()
        [1, 0, 1, 1, 1]
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
        # Reducers that read a value together read all of its elements.
        quantity=None if powers is None or each > 1 else "exponents",
        is_builtin=True,
    )


def topk(k: int) -> Reducer:
    """Make a reducer that returns the `k` largest elements, the largest first.

    Args:
        k: The number of elements.

    Returns:
        A reducer with a result of shape `[..., k]`. If a value has fewer elements, the smallest
        number of the dtype, such as `-inf`, fills the rest.

    Raises:
        ValueError: If `k` is not an integer of at least 1.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def f(x):
        ...     return tapax.sow(2 * x, "h").sum()
        >>> x = jnp.array([1.0, -2.0, 0.0, 4.0])
        >>> tapax.capture(f, values={"h": tapax.reduce.topk(2)})(x)[1].values["h"].tolist()
        [8.0, 2.0]
    """
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
    """Make a reducer that estimates quantiles to a relative error.

    The state is a sketch of a fixed size (DDSketch: Masson, Rim and Lee 2019), with about
    `log(most / least) / error` counts for `magnitudes=(least, most)`.

    Args:
        q: The quantiles to estimate, from 0 to 1: a number or several. The result for each is an
            estimate of the element of rank floor(q (n - 1)), which `numpy.quantile` returns with
            `method="lower"`.
        error: The largest relative error of an estimate, at least 1e-5 and below 1.
        magnitudes: The smallest and the largest magnitude for which `error` holds. Elements of
            smaller magnitudes count as zero. Of the elements of larger magnitudes, the sketch knows
            only the smallest and the largest.
        sample: The fraction of the elements to count, as in `tapax.reduce.histogram`. The quantiles
            are then those of the sample.
        seed: The seed of the sample, as in `tapax.reduce.histogram`.

    Returns:
        A reducer with a result of shape `[..., len(q)]`, or `[..., 1]` if `q` is a number. NaNs do
        not count; the result is NaN if there is no other element.

    Raises:
        ValueError: If `q` is not numbers from 0 to 1, `error` is out of range, `magnitudes` is not
            two positive numbers in order, `sample` is not 1/n, or `seed` is out of range.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def f(x):
        ...     return tapax.sow(2 * x, "h").sum()
        >>> x = jnp.array([1.0, -2.0, 0.0, 4.0])
        >>> quantiles = tapax.reduce.quantiles([0.0, 0.5, 1.0])
        >>> tapax.capture(f, values={"h": quantiles})(x)[1].values["h"].tolist()
        [-4.0, 0.0, 8.0]
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
