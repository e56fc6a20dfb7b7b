"""The primitive `change`: the derivative of a function that the walk supplies later.

The walk knows which function `f` an edit applies to a site. If the user's code takes a gradient,
JAX has differentiated the program before the walk. So if a value may be edited, the derivative rule
of its tap leaves a `change` equation, a placeholder for the derivative of `f`, which the walk
evaluates. JAX may differentiate the derivative too, so `change` has an `order`. Let `D` be the nth
derivative of `f` at `x`, which is linear in each of its directions:

==============  ============================  ====================================================
`transposed`    operands                      result
==============  ============================  ====================================================
no              token, x, t1 ... tn           `D[t1, ..., tn]`
yes             token, x, t1 ... tn-1, ct     the `v` for which `<v, t> = <ct, D[t1, ..., tn-1, t]>`
==============  ============================  ====================================================

The order of the directions does not matter, so `change` is closed under differentiation and under
transposition. The derivative with respect to `x` has one more direction; the derivative with
respect to a direction or `ct` replaces that operand by its tangent.

`of` names the function: `value` is the change of the value of a site, `grad` the change of its
gradient. Without an edit the function is the identity, whose first derivative is the last operand.
`token` identifies the call of the site. All other operands have one type; `axes` are their mapped
axes, outermost first, and `in_value` says for each axis whether `x` has it too, or only a
derivative.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from tapax import _jax
from tapax._jax import Args, PyTree, Value, typed

change_p = _jax.Primitive("change")


def identity(*operands: Value, order: int) -> Any:
    """Evaluate `change` for the identity, whose higher derivatives are zero."""
    last = operands[-1]
    return last if order < 2 else _jax.zeros(jax.typeof(last))


def derivative(fn: Callable[[Any], Any], order: int, transposed: bool, x: Value, *ts: Value) -> Any:
    """Evaluate `change` for `fn`, with the operands `x` and `ts`."""
    if order == 0:
        return fn(x)
    directions = ts[:-1] if transposed else ts
    for t in directions:
        fn = functools.partial(_along, fn, t)
    if not transposed:
        return fn(x)
    (out,) = typed.vjp(fn, x)[1](ts[-1])
    return out


def _along(fn: Callable[[Any], Any], t: Value, x: Value) -> Any:
    return typed.jvp(fn, (x,), (t,))[1]


def _impl(token: Value, *operands: Value, order: int, **params: Any) -> Any:
    del token, params
    return identity(*operands, order=order)


def _batch(
    axis_data: Any, args: Args, dims: Any, *, axes: Any, in_value: PyTree, **params: Any
) -> Any:
    token, *operands = args
    dims = dims[1:]
    mapped = [d for d in (dims[-1], *dims) if d is not None]
    if not mapped:
        return change_p.bind(*args, axes=axes, in_value=in_value, **params), None
    dim = mapped[0]
    aligned = [with_axis(x, d, dim, axis_data.size) for x, d in zip(operands, dims, strict=True)]
    axes = (dim, *(a + (a >= dim) for a in axes))
    in_value = (dims[0] is not None, *in_value)
    return change_p.bind(token, *aligned, axes=axes, in_value=in_value, **params), dim


def with_axis(x: Value, now: int | None, then: int, size: int) -> Any:
    """Move the mapped axis of `x` from `now` to `then`; add an axis of `size` if `now` is None."""
    return x if now == then else jnp.moveaxis(typed.bdim_at_front(x, now, size), 0, then)


def _jvp(primals: PyTree, tangents: PyTree, *, order: int, **params: Any) -> Any:
    token, x, *ts = primals
    _, dx, *dts = tangents
    out = change_p.bind(*primals, order=order, **params)
    parts = [
        change_p.bind(token, x, *ts[:i], dt, *ts[i + 1 :], order=order, **params)
        for i, dt in enumerate(dts)
        if type(dt) is not ad.Zero
    ]
    if type(dx) is not ad.Zero:
        one_more = [*ts[:-1], dx, *ts[-1:]]
        parts.append(change_p.bind(token, x, *one_more, order=order + 1, **params))
    if not parts:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(ad.add_jaxvals, parts)


def _transpose(
    ct: Value, token: Value, x: Value, *ts: Value, transposed: bool, **params: Any
) -> Any:
    (position,) = (i for i, t in enumerate(ts) if type(t) is ad.UndefinedPrimal)
    outs: list[Any] = [None] * (len(ts) + 2)
    if type(ct) is ad.Zero:
        outs[position + 2] = ad.Zero(ts[position].aval)
        return outs
    others = [t for i, t in enumerate(ts) if i != position]
    if not transposed:
        new, turned = [*others, ct], True
    elif position == len(ts) - 1:
        new, turned = [*others, ct], False
    else:
        new, turned = [*others[:-1], ct, others[-1]], True
    outs[position + 2] = change_p.bind(token, x, *new, transposed=turned, **params)
    return outs


def taylor(
    token: Value, curves: Sequence[Sequence[Value]], n: int, order: int, **params: Any
) -> Any:
    """Return the nth Taylor coefficient, n > 0, of `change` along curves.

    `curves` has the Taylor coefficients of `x` and of the directions. With `order` 0 this is the
    coefficient of the function itself, by the formula of Faà di Bruno; the product rule adds the
    directions.
    """
    x, *ts = curves
    parts: list[Value] = []
    for degrees in itertools.product(range(n + 1), repeat=len(ts)):
        directions = [t[degree] for t, degree in zip(ts, degrees, strict=True)]
        for sizes in _compositions(n - sum(degrees)):
            k = len(sizes)
            more = [*directions[:-1], *(x[size] for size in sizes), *directions[-1:]]
            part = change_p.bind(token, x[0], *more, order=order + k, **params)
            parts.append(part / math.factorial(k) if k > 1 else part)
    return functools.reduce(ad.add_jaxvals, parts)


def _compositions(n: int) -> Iterator[tuple[int, ...]]:
    """Yield all sequences of positive integers with the sum `n`; none if it is negative."""
    if n == 0:
        yield ()
    for first in range(1, n + 1):
        for rest in _compositions(n - first):
            yield (first, *rest)


def _along_curves(primals: Any, series: Any, *, order: int, **params: Any) -> Any:
    token, *operands = primals
    curves = [[x, *terms] for x, terms in zip(operands, series[1:], strict=True)]
    degrees = range(1, len(series[0]) + 1)
    terms = [taylor(token, curves, n, order, **params) for n in degrees]
    return change_p.bind(*primals, order=order, **params), terms


change_p.def_impl(_impl)
change_p.def_abstract_eval(lambda *args, **params: args[-1])
_lowering = typed.lower_fun(_impl, multiple_results=False)
_jax.register_rules(change_p, _lowering, _batch, _jvp, _transpose)
_jax.register_jet(change_p, _along_curves)
