"""Gradients of functions with respect to values inside them.

`grad` and `value_and_grad` differentiate a loss that takes no gradient itself. They differentiate
nothing before the sites, and compute no gradients of parameters. `jacobian` differentiates one site
with respect to another.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._api.edit_rules import whole
from tapax._api.perturbations import AT, adding, differentiable, zeros_at
from tapax._calling.program import TracedCall
from tapax._calling.survey import Spot, program_order, survey
from tapax._calling.transform import Transform, check_function, transformed
from tapax._jax import PyTree, Value
from tapax._jaxpr.leading_axes import vmapped
from tapax._results import SiteDict
from tapax._sites import OneSite, Selection, SiteError, StepSlice
from tapax._walk.plan import Plan, Reading

P = ParamSpec("P")


def grad(
    loss: Callable[P, Any], at: Selection = "**", has_aux: bool = False, *, modules: Any = True
) -> Callable[P, Any]:
    """Make a function that returns the gradients of `loss` with respect to its sites, by name.

    A site has no gradient if the loss does not depend on it, or if it is in a while loop or inside
    a function with a custom derivative rule. A glob skips such a site.

    Args:
        loss: A function that returns one real number, or `(loss, aux)` with `has_aux`. It takes no
            gradient itself; see `tapax.capture` for a step that does.
        at: Selects the sites, as in `tapax.capture`.
        has_aux: Whether `loss` returns `(loss, aux)`.
        modules: The modules whose results are sites, as in `tapax.capture`.

    Returns:
        A function of the arguments of `loss` that returns a dict of gradients by the names of the
        sites, or `(gradients, aux)` with `has_aux`. A gradient has the shape of the array that a
        capture of the site returns.

    Raises:
        TypeError: If `loss` is not a function, or, when the returned function is called, if `loss`
            does not return one real number first.
        SiteError: When the returned function is called, if `at` picks no site, names a site that
            has no gradient, or is a glob none of whose sites has a gradient.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def loss(w, x):
        ...     h = tapax.sow(w * x, "h")
        ...     return jnp.sum(h**2)
        >>> tapax.grad(loss)(2.0, jnp.array([1.0, 3.0]))["h"].tolist()
        [4.0, 12.0]
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
    """Make a function that returns the result of `loss` and its gradients by site, as `grad` does.

    Args:
        loss: A function that returns one real number, or `(loss, aux)` with `has_aux`.
        at: Selects the sites, as in `tapax.capture`.
        has_aux: Whether `loss` returns `(loss, aux)`.
        modules: The modules whose results are sites, as in `tapax.capture`.

    Returns:
        A function of the arguments of `loss` that returns `(value, gradients)`. `value` is the
        result of `loss`, including `aux`; `gradients` is a dict by the names of the sites.

    Raises:
        TypeError: As for `tapax.grad`.
        SiteError: As for `tapax.grad`.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def loss(w, x):
        ...     h = tapax.sow(w * x, "h")
        ...     return jnp.sum(h**2), {"mean": h.mean()}
        >>> compute = tapax.value_and_grad(loss, has_aux=True)
        >>> (value, aux), grads = compute(2.0, jnp.array([1.0, 3.0]))
        >>> float(value), float(aux["mean"]), grads["h"].tolist()
        (40.0, 4.0, [4.0, 12.0])
    """
    check_function(loss, "value_and_grad")
    plan = Plan.make(at, None, modules=modules, replacing=True, names=AT)
    return transformed(loss, _GradientTransform(plan, has_aux))


def jacobian(
    fn: Callable[P, Any], of: Selection, wrt: Selection, *, modules: Any = True
) -> Callable[P, Any]:
    """Make a function that returns the derivative of one site with respect to another.

    It differentiates forward or backward, whichever takes fewer passes.

    Args:
        fn: The function that contains the sites, jitted or not.
        of: Selects the site to differentiate; None differentiates the result of `fn` instead.
        wrt: Selects the site with respect to which to differentiate.
        modules: The modules whose results are sites, as in `tapax.capture`.

    Returns:
        A function of the arguments of `fn` that returns an array with the axes of `of` followed by
        the axes of `wrt`. If `of` is None, it returns a pytree like the result of `fn`, with such
        an array for each array in the result.

    Raises:
        TypeError: If `fn` is not a function.
        SiteError: When the returned function is called, if `of` or `wrt` does not pick exactly one
            site with all of its iterations, or if there is no derivative with respect to `wrt`.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def f(x):
        ...     h = tapax.sow(x**2, "h")
        ...     return tapax.sow(h[::-1] * 3, "reversed").sum()
        >>> tapax.jacobian(f, of="reversed", wrt="h")(jnp.array([1.0, 2.0])).tolist()
        [[0.0, 3.0], [3.0, 0.0]]
        >>> tapax.jacobian(f, of=None, wrt="h")(jnp.array([1.0, 2.0])).tolist()
        [3.0, 3.0]
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
    """Differentiates the first result of a program with respect to sites."""

    plan: Plan
    has_aux: bool

    def prepare(self, call: TracedCall) -> Any:
        outs = _jax.open_jaxpr(call.program.jaxpr).outvars
        kind = outs[0].aval if outs else None
        if kind is None or kind.shape or not jnp.issubdtype(kind.dtype, jnp.floating):
            what = "no array" if kind is None else f"{kind.dtype}{list(kind.shape)}"
            raise TypeError(
                f"A gradient needs a loss, one real number, but the function returns {what} "
                "first. To return more than the loss, return (loss, aux) and pass has_aux=True."
            )
        spots = survey(call, self.plan, [0])
        if not spots:
            raise SiteError(
                f"at={self.plan.values!r} picks no site, so there is no gradient to compute. Mark "
                "a value with tapax.sow(value, name), or select operations with tapax.ops."
            )
        return differentiable(spots, self.plan, reaching=True, some=True)

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        def loss(zeros: list[Any]) -> Any:
            outs = call.run_changed(adding(map(whole, prepared), zeros, _inject))
            return outs[0], outs

        zeros = [zeros_at(whole(spot)) for spot in prepared]
        value, back, outs = jax.vjp(loss, zeros, has_aux=True)
        (grads,) = back(jnp.ones_like(value))
        place = program_order(prepared)
        found = sorted(
            (
                (place(spot, reading.layer), name, part)
                for spot, grad in zip(prepared, grads, strict=True)
                for reading, name, part in _readings(spot, grad)
            ),
            key=operator.itemgetter(0),
        )
        return outs, SiteDict((name, part) for _, name, part in found)

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        pair = isinstance(out, tuple) and len(out) == 2
        if pair != self.has_aux or not (pair or isinstance(out, jax.Array)):
            expected = "(loss, aux), because has_aux=True" if self.has_aux else "the loss alone"
            raise TypeError(
                f"The function must return {expected}, but returns {type(out).__name__}. With "
                "has_aux=True it returns (loss, aux)."
            )
        return out, extra


@jax.custom_jvp
def _inject(x: Value, zeros: PyTree) -> Any:
    """Return `x`, with the derivative of `x + zeros`: the program needs neither sum nor zeros."""
    del zeros
    return x


@functools.partial(_inject.defjvp, symbolic_zeros=True)
def _(primals: PyTree, tangents: PyTree) -> Any:
    moved = [t for t in tangents if not isinstance(t, jax.custom_derivatives.SymbolicZero)]
    return primals[0], functools.reduce(jnp.add, moved) if moved else tangents[0]


def _readings(spot: Spot, grad: Any) -> Iterator[tuple[Reading, str, Any]]:
    """Select the requested iterations and entries from a whole gradient, with their names."""
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
        yield reading, dataclasses.replace(spot.site, path=reading.path).name, part


@dataclasses.dataclass(frozen=True)
class _JacobianTransform(Transform):
    """Differentiates one site, or the results of the program, with respect to another site."""

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
        f"{name} picks {len(spots)} sites, but a Jacobian needs one site with all of its "
        f"iterations. The sites are {names or 'none'}."
    )
