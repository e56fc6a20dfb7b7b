"""Gradients of functions by values inside them.

`grad` and `value_and_grad` give the gradients of a loss that takes none itself. Nothing that lies
before the sites is differentiated, and no parameter's gradient is computed.

>>> import jax.numpy as jnp, tapax
>>> def loss(w, x):
...     h = tapax.sow(w * x, "h")
...     return jnp.sum(h**2)
>>> tapax.grad(loss)(2.0, jnp.array([1.0, 3.0]))
{'h': Array([ 4., 12.], dtype=float32)}

`jacobian` is the derivative of one value by another, or of the results:

>>> tapax.jacobian(loss, of=None, wrt="h")(2.0, jnp.array([1.0, 3.0])).tolist()
[4.0, 12.0]
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._api.change_builder import whole
from tapax._api.perturbations import AT, adding, differentiable, zeros_at
from tapax._calling.program import TracedCall
from tapax._calling.survey import Spot, survey
from tapax._calling.transform import Transform, check_function, transformed
from tapax._jax import PyTree, Value
from tapax._jaxpr.leading_axes import vmapped
from tapax._results import SiteDict
from tapax._sites import OneSite, Selection, SiteError, StepSlice
from tapax._walk.plan import Plan

P = ParamSpec("P")


def grad(
    loss: Callable[P, Any], at: Selection = "**", has_aux: bool = False, *, modules: Any = True
) -> Callable[P, Any]:
    """A function that returns the gradients of `loss` by the values of its sites, by name.

    A site has none if the loss does not depend on it, or if it is in a while loop or inside of a
    function with a derivative rule of its own; one that is named exactly then raises. With
    `has_aux`, `loss` returns `(loss, aux)`, and the function `(gradients, aux)`.
    """
    both = value_and_grad(loss, at, has_aux, modules=modules)

    @functools.wraps(loss, updated=())
    def gradients(*args: P.args, **kwargs: P.kwargs) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradients


def value_and_grad(
    loss: Callable[P, Any], at: Selection = "**", has_aux: bool = False, *, modules: Any = True
) -> Callable[P, Any]:
    """A function that returns what `loss` does, and its gradients by the values of its sites."""
    check_function(loss, "value_and_grad")
    plan = Plan.make(at, None, modules=modules, replacing=True, names=AT)
    return transformed(loss, _GradientTransform(plan, has_aux))


def jacobian(
    fn: Callable[P, Any], of: Selection, wrt: Selection, *, modules: Any = True
) -> Callable[P, Any]:
    """A function that returns the derivative of one site by another, or of what `fn` returns.

    The axes of `of` come first, then those of `wrt`. It goes forward or backward, whichever takes
    fewer passes.
    """
    check_function(fn, "jacobian")
    both = [
        Plan.make(selection, None, modules=modules, replacing=True, names=(name, ""))
        for name, selection in (("wrt", wrt), ("of", of))
    ]
    plan = dataclasses.replace(both[0], values=(both[0].values, both[1].values))
    return transformed(fn, _JacobianTransform(plan, *both))


@dataclasses.dataclass(frozen=True)
class _GradientTransform(Transform):
    """Takes the gradient of the first result."""

    plan: Plan
    has_aux: bool

    def prepare(self, call: TracedCall) -> Any:
        outs = _jax.open_jaxpr(call.program.jaxpr).outvars
        kind = outs[0].aval if outs else None
        if kind is None or kind.shape or not jnp.issubdtype(kind.dtype, jnp.floating):
            what = "no array" if kind is None else f"{kind.dtype}{list(kind.shape)}"
            raise TypeError(
                f"A gradient is that of a loss, one real number, but the function returns {what} "
                "first. Return (loss, aux), and give has_aux=True, to return more."
            )
        spots = survey(call, self.plan, [0])
        if not spots:
            raise SiteError(
                f"A gradient was asked for at {self.plan.values!r}, but that picks no site. Mark a "
                "value with tapax.sow(value, name), or select operations with tapax.ops."
            )
        return differentiable(spots, self.plan, reaching=True, some=True)

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        def loss(zeros: list[Any]) -> Any:
            outs = call.run_changed(adding(map(whole, prepared), zeros, _inject))
            return outs[0], outs

        zeros = [zeros_at(whole(spot)) for spot in prepared]
        value, back, outs = jax.vjp(loss, zeros, has_aux=True)
        (grads,) = back(jnp.ones_like(value))
        both = zip(prepared, grads, strict=True)
        found = (pair for spot, grad in both for pair in _readings(spot, grad))
        return outs, SiteDict(found)

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        pair = isinstance(out, tuple) and len(out) == 2
        if pair != self.has_aux or not (pair or isinstance(out, jax.Array)):
            expected = "(loss, aux), as has_aux=True says" if self.has_aux else "the loss alone"
            raise TypeError(
                f"The function must return {expected}, but returns {type(out).__name__}. With "
                "has_aux=True it returns (loss, aux)."
            )
        return out, extra


@jax.custom_jvp
def _inject(x: Value, zeros: PyTree) -> Any:
    """`x + zeros` without the addition, and so without the zeros."""
    del zeros
    return x


@functools.partial(_inject.defjvp, symbolic_zeros=True)
def _(primals: PyTree, tangents: PyTree) -> Any:
    moved = [t for t in tangents if not isinstance(t, jax.custom_derivatives.SymbolicZero)]
    return primals[0], functools.reduce(jnp.add, moved) if moved else tangents[0]


def _readings(spot: Spot, grad: Any) -> Iterator[tuple[str, Any]]:
    """Of a gradient with all iterations and entries, those that are asked for, by name."""
    for reading in spot.readings:
        steps = dict(itertools.zip_longest(spot.loops, reading.steps))
        index: list[Any] = []
        for depth in spot.depths:
            step = steps.pop(depth, None)
            if isinstance(step, int):
                spot.check_step(step, depth)
            index.append(step.slice if isinstance(step, StepSlice) else step)
        if any(step is not None for step in steps.values()):
            spot.check_step(0, None)
        part = grad[tuple(slice(None) if i is None else i for i in index)]
        if reading.index is not None:
            reading.index.check(spot.own.shape, spot.site)
            part = vmapped(reading.index.pick, part.ndim - len(spot.own.shape))(part)
        yield dataclasses.replace(spot.site, path=reading.path).name, part


@dataclasses.dataclass(frozen=True)
class _JacobianTransform(Transform):
    """Takes the derivative of one site, or of the results if there is none, by another."""

    plan: Plan
    wrt: Plan
    of: Plan
    stateless = True

    def prepare(self, call: TracedCall) -> Any:
        wrt = _only(survey(call, self.wrt), self.wrt)
        differentiable([wrt], dataclasses.replace(self.wrt, values=wrt.site.name))
        if self.of.values is None:
            return wrt, None
        return wrt, _only(survey(call, self.of), self.of)

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        wrt, of = prepared
        plan = dataclasses.replace(self.of, values=None if of is None else OneSite(of.site.name))

        def inner(zeros: PyTree) -> Any:
            changes = adding([whole(wrt)], [zeros], _inject)
            outs, taps = call.program.walk(plan, call.arrays, changes)
            return outs if of is None else taps.values[of.site.name]

        zeros = zeros_at(whole(wrt))
        results = jax.tree.leaves(jax.eval_shape(inner, zeros))
        forward = math.prod(wrt.site.shape) < sum(math.prod(x.shape) for x in results)
        made = (jax.jacfwd if forward else jax.jacrev)(inner)(zeros)
        return (made, ()) if of is None else (None, made)

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        return out if self.of.values is None else extra


def _only(spots: Sequence[Spot], plan: Plan) -> Spot:
    if len(spots) == 1 and not any(reading.is_part for reading in spots[0].readings):
        return spots[0]
    name = f"{plan.names[0]}={plan.values!r}"
    names = ", ".join(repr(f"{s.site.path}@{s.site.call}") for s in spots)
    raise SiteError(
        f"{name} picks {len(spots)} sites, but a Jacobian is that of one, with all of its "
        f"iterations: {names or 'there are none'}."
    )
