"""Statistics with a state of a few numbers: sums, moments, extremes, the last value."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax._jax import PyTree, Value
from tapax.reduce import _sums
from tapax.reduce._packed_counts import count_true
from tapax.reduce._reducer import DirectState, Reducer


def _over(n: Any, total: Any) -> Any:
    return total / n.astype(total.dtype)


def _along(
    name: str,
    see: Callable[..., Any],
    combine: Callable[[Any, Any], Any],
    finish: Callable[[Any], Any],
    needs: str = "numbers",
    start: Callable[[Any, Any], Any] | None = None,
    **options: Any,
) -> Reducer:
    """A reducer that can be had along an axis. Equal axes make equal reducers.

    `see(axis, *xs)` is the state of one value. The one that has seen nothing is `start(axis, x)`,
    or else has zeros in the place of every number.
    """

    @functools.cache
    def made(axis: Any) -> Reducer:
        def init(x: Value) -> Any:
            if start is not None:
                return start(axis, x)
            xs = [x, x] if options.get("paired") else [x]
            like = jax.eval_shape(functools.partial(see, axis), *xs)
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)

        def update(state: PyTree, *xs: Value) -> Any:
            return combine(state, see(axis, *xs))

        kept = {"needs": needs, "axis": axis, "make": made, "is_builtin": True, **options}
        if axis is not None:
            kept["quantity"] = None
        direct = DirectState(init, update, functools.partial(see, axis))
        return Reducer(init, update, combine, finish, name, direct=direct, **kept)

    return made(None)


def _summing(
    name: str,
    add_up: Callable[..., Any],
    finish: Callable[[Any], Any],
    needs: str = "numbers",
    **options: Any,
) -> Reducer:
    """A reducer whose state is sums over the elements, and how many there were.

    `add_up(axes, *xs)` gives the sums over some axes.
    """

    def see(axis: Any, *xs: Value) -> Any:
        axes = _sums.all_but(xs[0], axis)
        found = add_up(axes, *map(_sums.wide, xs))
        return (*found, jnp.broadcast_to(_sums.size(xs[0], axes), found[0].shape))

    return _along(name, see, _sums.add, finish, needs, merge=_sums.add_all, **options)


_FLOATS = "floating-point numbers"


def _sum(axes: tuple[int, ...], x: Value) -> list[Any]:
    return [x.sum(axes, dtype=x.dtype)]


def _squares(axes: tuple[int, ...], *xs: Value) -> list[Any]:
    return [total for x in xs for total in _sums.sum_squares(x, axes)]


sum = _summing("sum", _sum, lambda s: s[0])
mean = _summing("mean", _sum, lambda s: _over(s[1], s[0]), _FLOATS)
norm = _summing("norm", _squares, lambda s: _sums.root(s[:2]), _FLOATS, quantity="squares")
rms = _summing(
    "rms",
    _squares,
    lambda s: _sums.root(s[:2], s[2].astype(s[0].dtype)),
    _FLOATS,
    quantity="squares",
)


def _counting(
    name: str, test: Callable[[Any], Any], finish: Callable[[Any], Any], **options: Any
) -> Reducer:
    """A reducer whose state is how many elements pass a test, and how many there were."""

    def see(axis: Any, x: Value) -> Any:
        axes, passed = _sums.all_but(x, axis), test(_sums.wide(x))
        found = count_true([passed])[0] if axis is None else _sums.count(passed, axes)
        return found, jnp.broadcast_to(_sums.size(x, axes), found.shape)

    return _along(name, see, _sums.add, finish, merge=_sums.add_all, **options)


nonfinite = _counting(
    "nonfinite", lambda x: ~jnp.isfinite(x), lambda s: _sums.as_integers(s[0]), quantity="nonfinite"
)
zeros = _counting(
    "zeros", lambda x: x == 0, lambda s: s[0].astype(jnp.float32) / s[1].astype(jnp.float32)
)


def _cosine(state: PyTree) -> Any:
    dot, g, v = state[0], _sums.root(state[1:3]), _sums.root(state[3:5])
    none = (g == 0) | (v == 0)
    return jnp.where(none, 0, dot / jnp.where(none, 1, g) / jnp.where(none, 1, v))


cosine = _summing(
    "cosine",
    lambda axes, g, v: [*_sum(axes, jnp.real(jnp.conj(g) * v)), *_squares(axes, g, v)],
    _cosine,
    _FLOATS,
    paired=True,
)
update_ratio = _summing(
    "update_ratio", _squares, lambda s: _sums.root(s[:2]) / _sums.root(s[2:4]), _FLOATS, paired=True
)


# Chan, Golub and LeVeque (1979): the moments of two samples from those of each. With n elements of
# the mean m, and q the sum of the squares of their distances from it:
#   n = na + nb,  m = ma + (mb - ma) nb / n,  q = qa + qb + |mb - ma|^2 na nb / n
# A mean is kept as two numbers, one of about its size and the small rest, so that means which lie
# close together can be told apart.


def _see_moments(axis: Any, x: Value) -> Any:
    x, axes = _sums.wide(x), _sums.all_but(x, axis)
    n = _sums.size(x, axes)
    count = jnp.maximum(n, 1).astype(x.real.dtype)
    m = x.sum(axes, keepdims=True) / count
    apart = x - jnp.where(jnp.isfinite(m), m, 0)
    rest = jnp.where(jnp.isfinite(m), apart.sum(axes, keepdims=True) / count, 0)
    q = _sums.square(x - m - rest).sum(axes)
    return jnp.broadcast_to(n, q.shape), m.reshape(q.shape), rest.reshape(q.shape), q


def _combine_moments(a: Value, b: Value) -> Any:
    (na, ma, ra, qa), (nb, mb, rb, qb) = a, b
    n = _sums.add(na, nb)
    fa, fb = (k.astype(qa.dtype) / jnp.maximum(n, 1).astype(qa.dtype) for k in (na, nb))
    apart = (mb - ma) + (rb - ra)
    # Of numbers that are none there is no small rest.
    finite = jnp.isfinite(ma) & jnp.isfinite(mb)
    m = jnp.where(finite, ma, ma * fa + mb * fb)
    rest = jnp.where(finite, ra + apart * fb, 0)
    both = n, m, rest, qa + qb + _sums.square(apart) * fa * nb.astype(qa.dtype)
    one = jax.tree.map(lambda x, y: jnp.where(na == 0, y, x), a, b)
    return jax.tree.map(lambda x, y: jnp.where((na == 0) | (nb == 0), x, y), one, both)


def _mean_of(state: PyTree) -> Any:
    n, m, rest, _ = state
    return jnp.where(n == 0, jnp.nan, m + rest)


def _variance(state: PyTree) -> Any:
    return _over(state[0], state[3])


var = _along("var", _see_moments, _combine_moments, _variance, _FLOATS)
moments = _along(
    "moments",
    _see_moments,
    _combine_moments,
    lambda s: jnp.stack([_mean_of(s), _variance(s).astype(s[1].dtype)], -1),
    _FLOATS,
    labels=("mean", "var"),
)


def _see_ends(axis: Any, x: Value) -> Any:
    x = x.astype(_sums.ordered(x.dtype))
    return _sums.ends(x, _sums.all_but(x, axis))


def _start_ends(axis: Any, x: Value) -> Any:
    kept = tuple(n for i, n in enumerate(x.shape) if i not in _sums.all_but(x, axis))
    dtype = _sums.ordered(x.dtype)
    low, high = _sums.extremes(dtype)
    return jnp.full(kept, high, dtype), jnp.full(kept, low, dtype)


minmax = _along(
    "minmax",
    _see_ends,
    lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])),
    lambda state: jnp.stack(state, -1),
    "real numbers",
    _start_ends,
    merge=lambda states: (states[0].min(0), states[1].max(0)),
    labels=("min", "max"),
    quantity="ends",
)

last = Reducer(
    init=lambda x: jnp.zeros(x.shape, x.dtype),
    update=lambda state, x: x,
    combine=lambda a, b: b,
    name="last",
    over_maps=False,
    is_builtin=True,
)
