"""Statistics with a state of a few numbers: sums, moments, extremes, the last value.

>>> import jax, jax.numpy as jnp, tapax
>>> def f(x):
...     return tapax.sow(2 * x, "h").sum()
>>> x = jnp.array([1.0, -2.0, 0.0, 4.0])
>>> def read(*reducers, fn=f, of="values"):
...     taps = (tapax.capture(fn, **{of: {"h": reducer}})(x)[1] for reducer in reducers)
...     return [jnp.round(getattr(each, of)["h"], 2).tolist() for each in taps]
>>> read(tapax.reduce.sum, tapax.reduce.mean, tapax.reduce.var, tapax.reduce.moments)
[6.0, 1.5, 18.75, [1.5, 18.75]]
>>> read(tapax.reduce.minmax, tapax.reduce.zeros, tapax.reduce.nonfinite, tapax.reduce.last)
[[-4.0, 8.0], 0.25, 0, [2.0, -4.0, 0.0, 8.0]]
>>> [f"{norm:.2f}" for norm in read(tapax.reduce.norm, tapax.reduce.rms)]
['9.17', '4.58']
>>> ratios = read(tapax.reduce.cosine, tapax.reduce.update_ratio, fn=jax.grad(f), of="grads")
>>> [f"{ratio:.2f}" for ratio in ratios]
['0.33', '0.22']
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax._jax import PyTree, Value
from tapax.reduce import _sums
from tapax.reduce._packed_counts import count_true
from tapax.reduce._reducer import Reducer
from tapax.reduce._reducer_families import along, summing


def _over(n: Any, total: Any) -> Any:
    return total / n.astype(total.dtype)


_FLOATS = "floating-point numbers"


def _sum(axes: tuple[int, ...], x: Value) -> list[Any]:
    return [x.sum(axes, dtype=x.dtype)]


def _squares(axes: tuple[int, ...], *xs: Value) -> list[Any]:
    return [total for x in xs for total in _sums.sum_squares(x, axes)]


sum = summing(
    "sum",
    _sum,
    lambda s: s[0],
    doc="""Sum all elements of a value.

    Returns:
        One number for each call and each iteration of a scan around the site, of 32 bits or more.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "h").sum()
        >>> _, taps = tapax.capture(f, values={"h": tapax.reduce.sum})(jnp.array([3.0, -4.0]))
        >>> float(taps.values["h"])
        -2.0
    """,
)

mean = summing(
    "mean",
    _sum,
    lambda s: _over(s[1], s[0]),
    _FLOATS,
    doc="""Average all elements of a value.

    Returns:
        One number for each call and each iteration of a scan around the site.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "h").sum()
        >>> _, taps = tapax.capture(f, values={"h": tapax.reduce.mean})(jnp.array([3.0, -4.0]))
        >>> float(taps.values["h"])
        -1.0
    """,
)

norm = summing(
    "norm",
    _squares,
    lambda s: _sums.root(s[:2]),
    _FLOATS,
    lambda axes, x: _sums.root_squares(x, axes, mean=False),
    quantity="squares",
    doc="""Compute the norm of a value: the root of the sum of the squared magnitudes.

    The squares of float32 neither overflow nor underflow; in a loop, if the magnitudes are between
    1e-33 and 1e30.

    Returns:
        One real number for each call and each iteration of a scan around the site.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "h").sum()
        >>> _, taps = tapax.capture(f, values={"h": tapax.reduce.norm})(jnp.array([3.0, -4.0]))
        >>> round(float(taps.values["h"]), 4)
        10.0
    """,
)

rms = summing(
    "rms",
    _squares,
    lambda s: _sums.root(s[:2], s[2].astype(s[0].dtype)),
    _FLOATS,
    lambda axes, x: _sums.root_squares(x, axes, mean=True),
    quantity="squares",
    doc="""Compute the root mean square of a value: the root of the mean of the squared magnitudes.

    The squares of float32 neither overflow nor underflow; in a loop, if the magnitudes are between
    1e-33 and 1e30.

    Returns:
        One real number for each call and each iteration of a scan around the site.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "h").sum()
        >>> _, taps = tapax.capture(f, values={"h": tapax.reduce.rms})(jnp.array([3.0, -4.0]))
        >>> round(float(taps.values["h"]), 4)
        7.0711
    """,
)


def _counting(
    name: str, test: Callable[[Any], Any], finish: Callable[[Any], Any], **options: Any
) -> Reducer:
    """Make a reducer whose state is the number of elements that pass `test`, and of all."""

    def see(axis: Any, x: Value) -> Any:
        axes, passed = _sums.all_but(x, axis), test(_sums.wide(x))
        found = count_true([passed])[0] if axis is None else _sums.count(passed, axes)
        return found, jnp.broadcast_to(_sums.size(x, axes), found.shape)

    return along(name, see, _sums.add, finish, merge=_sums.add_all, **options)


nonfinite = _counting(
    "nonfinite",
    lambda x: ~jnp.isfinite(x),
    lambda s: _sums.as_integers(s[0]),
    quantity="nonfinite",
    doc="""Count the elements of a value that are NaN or infinite.

    Returns:
        One int32 for each call and each iteration of a scan around the site. A count that
        reaches the largest int32 stays there.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(jnp.log(x), "h").sum()
        >>> _, taps = tapax.capture(f, values={"h": tapax.reduce.nonfinite})(jnp.array([3.0, 0.0]))
        >>> int(taps.values["h"])
        1
    """,
)

zeros = _counting(
    "zeros",
    lambda x: x == 0,
    lambda s: s[0].astype(jnp.float32) / s[1].astype(jnp.float32),
    doc="""Compute the fraction of the elements of a value that are zero.

    Returns:
        One float32 between 0 and 1 for each call and each iteration of a scan around the site.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(jax.nn.relu(x), "h").sum()
        >>> _, taps = tapax.capture(f, values={"h": tapax.reduce.zeros})(jnp.array([3.0, -4.0]))
        >>> float(taps.values["h"])
        0.5
    """,
)


def _cosine(state: PyTree) -> Any:
    dot, g, v = state[0], _sums.root(state[1:3]), _sums.root(state[3:5])
    none = (g == 0) | (v == 0)
    return jnp.where(none, 0, dot / jnp.where(none, 1, g) / jnp.where(none, 1, v))


cosine = summing(
    "cosine",
    lambda axes, g, v: [*_sum(axes, jnp.real(jnp.conj(g) * v)), *_squares(axes, g, v)],
    _cosine,
    _FLOATS,
    paired=True,
    doc="""Compute the cosine between a gradient and the value of its site.

    A capture takes this reducer in `grads` only.

    Returns:
        One number between -1 and 1 for each call and each iteration of a scan around the site.
        It is 0 if the gradient or the value is zero.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "h").sum()
        >>> captured = tapax.capture(jax.grad(f), grads={"h": tapax.reduce.cosine})
        >>> _, taps = captured(jnp.array([3.0, 4.0]))
        >>> round(float(taps.grads["h"]), 4)
        0.9899
    """,
)

update_ratio = summing(
    "update_ratio",
    _squares,
    lambda s: _sums.root(s[:2]) / _sums.root(s[2:4]),
    _FLOATS,
    paired=True,
    doc="""Divide the norm of a gradient by the norm of the value of its site.

    A capture takes this reducer in `grads` only.

    Returns:
        One number for each call and each iteration of a scan around the site. It is infinite if
        the value is zero, and NaN if both are zero.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "h").sum()
        >>> captured = tapax.capture(jax.grad(f), grads={"h": tapax.reduce.update_ratio})
        >>> _, taps = captured(jnp.array([3.0, 4.0]))
        >>> round(float(taps.grads["h"]), 4)
        0.1414
    """,
)


# Chan, Golub and LeVeque (1979) combine the moments of two samples a and b. For n elements with the
# mean m, let q be the sum of their squared distances from m:
#   n = na + nb,  m = ma + (mb - ma) nb / n,  q = qa + qb + |mb - ma|^2 na nb / n
# The state stores a mean as two numbers, a rounded mean and the small rest, so that it can tell
# apart means that are close together.


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
    # A mean that is NaN or infinite has no rest.
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


var = along(
    "var",
    _see_moments,
    _combine_moments,
    _variance,
    _FLOATS,
    doc="""Compute the variance of a value: the mean of the squared distances from the mean.

    As in NumPy, the sum is divided by the number of elements, without a correction.

    Returns:
        One real number for each call and each iteration of a scan around the site.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "h").sum()
        >>> _, taps = tapax.capture(f, values={"h": tapax.reduce.var})(jnp.array([3.0, -4.0]))
        >>> float(taps.values["h"])
        49.0
    """,
)

moments = along(
    "moments",
    _see_moments,
    _combine_moments,
    lambda s: jnp.stack([_mean_of(s), _variance(s).astype(s[1].dtype)], -1),
    _FLOATS,
    labels=("mean", "var"),
    doc="""Compute the mean and the variance of all elements of a value.

    Returns:
        The mean and the variance, as an array of shape `[..., 2]`, for each call and each iteration
        of a scan around the site.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "h").sum()
        >>> _, taps = tapax.capture(f, values={"h": tapax.reduce.moments})(jnp.array([3.0, -4.0]))
        >>> taps.values["h"].tolist()
        [-1.0, 49.0]
    """,
)


def _see_ends(axis: Any, x: Value) -> Any:
    x = x.astype(_sums.ordered(x.dtype))
    return _sums.ends(x, _sums.all_but(x, axis))


def _start_ends(axis: Any, x: Value) -> Any:
    kept = tuple(n for i, n in enumerate(x.shape) if i not in _sums.all_but(x, axis))
    dtype = _sums.ordered(x.dtype)
    low, high = _sums.extremes(dtype)
    return jnp.full(kept, high, dtype), jnp.full(kept, low, dtype)


minmax = along(
    "minmax",
    _see_ends,
    lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])),
    lambda state: jnp.stack(state, -1),
    "real numbers",
    _start_ends,
    merge=lambda states: (states[0].min(0), states[1].max(0)),
    labels=("min", "max"),
    quantity="ends",
    doc="""Find the smallest and the largest element of a value.

    Returns:
        The smallest and the largest element, as an array of shape `[..., 2]`, for each call and
        each iteration of a scan around the site. Both are NaN if an element is NaN.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "h").sum()
        >>> _, taps = tapax.capture(f, values={"h": tapax.reduce.minmax})(jnp.array([3.0, -4.0]))
        >>> taps.values["h"].tolist()
        [-8.0, 6.0]
    """,
)


last = Reducer(
    init=lambda x: jnp.zeros(x.shape, x.dtype),
    update=lambda state, x: x,
    combine=lambda a, b: b,
    name="last",
    over_maps=False,
    is_builtin=True,
    doc="""Keep the value itself; `last.total` keeps the value of the last iteration alone.

    This reducer stacks the examples of a vmap and the devices of a mesh instead of combining them.

    Returns:
        The value, for each call and each iteration of a scan around the site.

    Example:
        >>> import jax, tapax
        >>> step = lambda x, _: (tapax.sow(2 * x, "h"), None)
        >>> f = lambda x: jax.lax.scan(step, x, length=3)[0]
        >>> _, taps = tapax.capture(f, values={"h": tapax.reduce.last.total})(1.0)
        >>> float(taps.values["h"])
        8.0
    """,
)
