"""Reducers: statistics that are taken inside the program, where the values are.

>>> import jax, jax.numpy as jnp, tapax
>>> def f(x):
...     layer = lambda x, _: (tapax.sow(jnp.tanh(2 * x), "h"), None)
...     return jax.lax.scan(layer, x, length=3)[0]
>>> out, taps = tapax.capture(f, values={"h": tapax.reduce.rms})(jnp.ones(1000))
>>> taps.values["h"].shape  # one number for each iteration; the values themselves are not kept
(3,)
>>> out, taps = tapax.capture(f, values={"h": tapax.reduce.rms.total})(jnp.ones(1000))
>>> taps.values["h"].shape  # one number for all of them
()

================================  =================================================================
reducer                           result
================================  =================================================================
`sum`, `mean`, `var`              of all elements; `var` as NumPy's, without a correction
`moments`                         mean and variance, `[..., 2]`
`norm`, `rms`                     root of the sum, and of the mean, of the squares
`minmax`                          smallest and largest, `[..., 2]`; NaN if there is one
`zeros`                           fraction of zeros
`nonfinite`                       how many NaN and Inf
`histogram(edges)`                counts as `numpy.histogram` has them: outside of the edges, none
`histogram(log2=(lo, hi))`        counts of magnitudes below 2^lo, between powers of 2, from 2^hi on
`topk(k)`                         the k largest, in order
`quantiles(q)`                    to a relative error, 1% unless told; see there
`cosine`, `update_ratio`          of a gradient to its value; for `grads`
`last`                            the value itself; `last.total` is that of the last iteration
================================  =================================================================

Given to a capture, `values={"**/mlp": rms}`, a reducer takes the place of the value: one result for
each call and each iteration of a scan, one for all iterations of a while loop. `rms.total` merges
all loops around a site. The examples of a vmap and the devices of a mesh are always combined, in
`last` alone they are not. `rms(axis=-1)` has one result for each unit, each place along that axis
of the value as it was marked; so have the others in the upper half of the table.

Values of less than 32 bits are accumulated in float32, float64 in float64. Counts stop at the
largest number that they can have.

`Reducer(init, update, combine, finish)` makes one's own: see `Reducer`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._counts import (
    COUNT,
    add,
    add_all,
    all_but,
    as_integers,
    extremes,
    ordered,
    root,
    size,
    square,
    squares,
    wide,
)
from tapax._reducer import Reducer
from tapax._sketch import histogram_of, quantiles_of

__all__ = [
    "Reducer",
    "cosine",
    "histogram",
    "last",
    "mean",
    "minmax",
    "moments",
    "nonfinite",
    "norm",
    "quantiles",
    "rms",
    "sum",
    "topk",
    "update_ratio",
    "var",
    "zeros",
]


def _over(n: Any, total: Any) -> Any:
    return total / n.astype(total.dtype)


def _along(name: str, make: Callable[[Any], dict[str, Any]], needs: str = "numbers") -> Reducer:
    """A reducer that can be had along an axis. Equal axes make equal reducers."""

    @functools.cache
    def made(axis: Any) -> Reducer:
        return Reducer(**make(axis), name=name, needs=needs, axis=axis, make=made)

    return made(None)


def _summing(
    name: str,
    terms: Callable[..., Any],
    finish: Callable[[Any], Any],
    needs: str = "numbers",
    **options: Any,
) -> Reducer:
    """A reducer whose state is the sum of something over the elements, and how many there were."""

    def make(axis: Any) -> dict[str, Any]:
        def see(*xs: Any) -> Any:
            axes = all_but(xs[0], axis)
            found = [t.sum(axes, dtype=t.dtype) for t in terms(*map(wide, xs))]
            return (*found, jnp.broadcast_to(size(xs[0], axes), found[0].shape))

        def init(x: Any) -> Any:
            like = jax.eval_shape(see, *[x] * (2 if options.get("paired") else 1))
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)

        return {
            "init": init,
            "update": lambda state, *xs: add(state, see(*xs)),
            "combine": add,
            "merge": add_all,
            "finish": finish,
            **options,
        }

    return _along(name, make, needs)


_FLOATS = "floating-point numbers"


def _flag(mask: Any) -> Any:
    return mask.astype(COUNT)


sum = _summing("sum", lambda x: [x], lambda s: s[0])
mean = _summing("mean", lambda x: [x], lambda s: _over(s[1], s[0]), _FLOATS)
norm = _summing("norm", squares, lambda s: root(s[:2]), _FLOATS)
rms = _summing("rms", squares, lambda s: root(s[:2], s[2].astype(s[0].dtype)), _FLOATS)
nonfinite = _summing("nonfinite", lambda x: [_flag(~jnp.isfinite(x))], lambda s: as_integers(s[0]))
zeros = _summing(
    "zeros",
    lambda x: [_flag(x == 0)],
    lambda s: s[0].astype(jnp.float32) / s[1].astype(jnp.float32),
)


def _dot(g: Any, v: Any) -> Any:
    return jnp.real(jnp.conj(g) * v)


def _cosine(state: Any) -> Any:
    dot, g, v = state[0], root(state[1:3]), root(state[3:5])
    none = (g == 0) | (v == 0)
    return jnp.where(none, 0, dot / jnp.where(none, 1, g) / jnp.where(none, 1, v))


cosine = _summing(
    "cosine", lambda g, v: [_dot(g, v), *squares(g), *squares(v)], _cosine, _FLOATS, paired=True
)
update_ratio = _summing(
    "update_ratio",
    lambda g, v: [*squares(g), *squares(v)],
    lambda s: root(s[:2]) / root(s[2:4]),
    _FLOATS,
    paired=True,
)


# Chan, Golub and LeVeque (1979): the moments of two samples from those of each. With n elements of
# the mean m, and q the sum of the squares of their distances from it:
#   n = na + nb,  m = ma + (mb - ma) nb / n,  q = qa + qb + |mb - ma|^2 na nb / n
# A mean is kept as two numbers, one of about its size and the small rest, so that means which lie
# close together can be told apart.


def _moments_of(x: Any, axes: tuple[int, ...]) -> Any:
    x = wide(x)
    n = size(x, axes)
    count = jnp.maximum(n, 1).astype(x.real.dtype)
    m = x.sum(axes, keepdims=True) / count
    apart = x - jnp.where(jnp.isfinite(m), m, 0)
    rest = jnp.where(jnp.isfinite(m), apart.sum(axes, keepdims=True) / count, 0)
    q = square(x - m - rest).sum(axes)
    return jnp.broadcast_to(n, q.shape), m.reshape(q.shape), rest.reshape(q.shape), q


def _combine_moments(a: Any, b: Any) -> Any:
    (na, ma, ra, qa), (nb, mb, rb, qb) = a, b
    n = add(na, nb)
    fa, fb = (k.astype(qa.dtype) / jnp.maximum(n, 1).astype(qa.dtype) for k in (na, nb))
    apart = (mb - ma) + (rb - ra)
    # Of numbers that are none there is no small rest.
    finite = jnp.isfinite(ma) & jnp.isfinite(mb)
    m = jnp.where(finite, ma, ma * fa + mb * fb)
    rest = jnp.where(finite, ra + apart * fb, 0)
    both = n, m, rest, qa + qb + square(apart) * fa * nb.astype(qa.dtype)
    one = jax.tree.map(lambda x, y: jnp.where(na == 0, y, x), a, b)
    return jax.tree.map(lambda x, y: jnp.where((na == 0) | (nb == 0), x, y), one, both)


def _mean_of(state: Any) -> Any:
    n, m, rest, _ = state
    return jnp.where(n == 0, jnp.nan, m + rest)


def _moments(name: str, finish: Callable[[Any], Any], **options: Any) -> Reducer:
    def make(axis: Any) -> dict[str, Any]:
        def see(x: Any) -> Any:
            return _moments_of(x, all_but(x, axis))

        def init(x: Any) -> Any:
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(see, x))

        return {
            "init": init,
            "update": lambda state, x: _combine_moments(state, see(x)),
            "combine": _combine_moments,
            "finish": finish,
            **options,
        }

    return _along(name, make, _FLOATS)


def _variance(state: Any) -> Any:
    return _over(state[0], state[3])


var = _moments("var", _variance)
moments = _moments(
    "moments",
    lambda s: jnp.stack([_mean_of(s), _variance(s).astype(s[1].dtype)], -1),
    labels=("mean", "var"),
)


def _minmax(axis: Any) -> dict[str, Any]:
    def init(x: Any) -> Any:
        kept = tuple(n for i, n in enumerate(x.shape) if i not in all_but(x, axis))
        dtype = ordered(x.dtype)
        low, high = extremes(dtype)
        return jnp.full(kept, high, dtype), jnp.full(kept, low, dtype)

    def see(x: Any) -> Any:
        x = x.astype(ordered(x.dtype))
        axes, (low, high) = all_but(x, axis), extremes(x.dtype)
        return x.min(axes, initial=high), x.max(axes, initial=low)

    def combine(a: Any, b: Any) -> Any:
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])

    return {
        "init": init,
        "update": lambda state, x: combine(state, see(x)),
        "combine": combine,
        "merge": lambda states: (states[0].min(0), states[1].max(0)),
        "finish": lambda state: jnp.stack(state, -1),
        "labels": ("min", "max"),
    }


minmax = _along("minmax", _minmax, "real numbers")

last = Reducer(
    init=lambda x: jnp.zeros(x.shape, x.dtype),
    update=lambda state, x: x,
    combine=lambda a, b: b,
    name="last",
    over_maps=False,
)


def _numbers(given: Any, as_number: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """The numbers in a sequence; None if there is something else in it, or it is none."""
    if isinstance(given, (str, bytes)):
        return None
    try:
        return tuple(as_number(x) for x in given)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        return None


def histogram(
    edges: Sequence[float] | None = None, *, log2: tuple[int, int] | None = None
) -> Reducer:
    """Counts between edges, as `numpy.histogram` has them; or of magnitudes, by powers of two.

    Every bin but the last is open on its right; what is outside of the edges, and NaN, is in none.
    With `log2=(lo, hi)` the edges are 0, 2^lo, ..., 2^hi, inf, and what is counted is `abs(x)`.
    """
    if (edges is None) == (log2 is None):
        raise TypeError("`histogram` takes `edges`, or `log2=(lo, hi)`, and not both.")
    if log2 is not None:
        ends = _numbers(log2, operator.index) or ()
        if len(ends) != 2 or not -1074 <= ends[0] <= ends[1] <= 1023:
            raise ValueError(
                f"`log2` must be two integers, the smaller first, but is {log2!r}: the powers of "
                "two between which magnitudes are counted."
            )
        low, high = ends
        return _histogram((0.0, *(2.0**p for p in range(low, high + 1)), math.inf), "numbers")
    found = _numbers(edges, float) or ()
    if len(found) < 2 or any(not a < b for a, b in itertools.pairwise(found)):
        raise ValueError(
            f"`edges` must be two numbers or more, each larger than the one before, but is "
            f"{edges!r}. They must be known when the function is traced."
        )
    return _histogram(found, "real numbers")


@functools.lru_cache(maxsize=256)
def _histogram(edges: tuple[float, ...], needs: str) -> Reducer:
    made = histogram_of(edges, magnitudes=needs == "numbers")
    return Reducer(**made, name="histogram", needs=needs, edges=edges)


def topk(k: int) -> Reducer:
    """The `k` largest elements, the largest first; where there are fewer, the smallest number."""
    found = None if isinstance(k, bool) else _numbers([k], operator.index)
    if found is None or found[0] < 1:
        raise ValueError(f"`topk` takes a number of elements, at least 1, but was given {k!r}.")
    return _topk(found[0])


@functools.lru_cache(maxsize=256)
def _topk(k: int) -> Reducer:
    def init(x: Any) -> Any:
        dtype = ordered(x.dtype)
        return jnp.full(k, extremes(dtype)[0], dtype)

    def largest(x: Any) -> Any:
        return jax.lax.top_k(x, k)[0]

    return Reducer(
        init=init,
        update=lambda state, x: largest(jnp.append(state, x.ravel().astype(state.dtype))),
        combine=lambda a, b: largest(jnp.append(a, b)),
        merge=lambda states: largest(states.ravel()),
        name="topk",
        needs="real numbers",
        labels=tuple(f"top{i}" for i in range(k)),
    )


def quantiles(
    q: Sequence[float] | float = (0.05, 0.25, 0.5, 0.75, 0.95),
    *,
    error: float = 0.01,
    magnitudes: tuple[float, float] = (1e-10, 1e10),
) -> Reducer:
    """Quantiles from a sketch of a fixed size: `[..., len(q)]`.

    Each is within the relative `error` of the element of rank floor(q (n - 1)), that of
    `numpy.quantile` with `method="lower"`, if its magnitude is between `magnitudes`. Smaller ones
    are taken for zero; of larger ones only the smallest and the largest element are known. The
    state has about `log(most / least) / error` counts (DDSketch: Masson, Rim and Lee 2019).
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
    return _quantiles(ranks, errors[0], *ends)


@functools.lru_cache(maxsize=256)
def _quantiles(ranks: tuple[float, ...], error: float, least: float, most: float) -> Reducer:
    return Reducer(
        **quantiles_of(ranks, error, least, most),
        name="quantiles",
        needs="real numbers",
        labels=tuple(f"q{x:g}" for x in ranks),
    )
