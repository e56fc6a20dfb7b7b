"""Gradients by values inside a function, and perturbations that are added to such values.

`grad` and `value_and_grad` give the gradients of a loss that takes none itself. Nothing that lies
before the sites is differentiated, and no parameter's gradient is computed.

>>> import jax, jax.numpy as jnp, jaxtap as jt
>>> def loss(w, x):
...     h = jt.sow(w * x, "h")
...     return jnp.sum(h**2)
>>> jt.grad(loss)(2.0, jnp.array([1.0, 3.0]))
{'h': Array([ 4., 12.], dtype=float32)}

`perturbations` and `perturbed` are the explicit form: zeros, one for every call, iteration and
example of a site, and the function to whose sites they are added. So derivatives of any kind by
values inside are those of an ordinary function:

>>> x = jnp.array([1.0, 3.0])
>>> zeros = jt.perturbations(loss)(2.0, x)
>>> jax.hessian(jt.perturbed(loss))(zeros, 2.0, x)["h"]["h"].tolist()
[[2.0, 0.0], [0.0, 2.0]]
>>> jt.jacobian(loss, of=None, wrt="h")(2.0, x).tolist()
[4.0, 12.0]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtap import _compat
from jaxtap._changes import Changes, Part
from jaxtap._job import Instrumented, Job, check_function
from jaxtap._plan import Plan
from jaxtap._program import Program
from jaxtap._replace import Making
from jaxtap._sites import Selection, SiteError, flatten, is_exact, matches, nearest
from jaxtap._survey import Spot, survey
from jaxtap._taps import SiteTable
from jaxtap._walk import Walk

P = ParamSpec("P")
_AT, _WRT = ("at", ""), ("of or wrt", "")


def grad(
    loss: Callable[P, Any], at: Selection = "**", has_aux: bool = False, *, modules: Any = True
) -> Callable[P, Any]:
    """A function that returns the gradients of `loss` by the values of its sites, by name.

    A site that the loss does not depend on has none; one that is named exactly then raises. With
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
    call = Instrumented(
        loss, _Differentiating(Plan.make(at, None, modules=modules, names=_AT), has_aux)
    )

    @functools.wraps(loss, updated=())
    def both(*args: P.args, **kwargs: P.kwargs) -> Any:
        return call((), args, kwargs)

    return both


def perturbations(
    fn: Callable[P, Any], at: Selection = "**", *, modules: Any = True
) -> Callable[P, dict[str, Any]]:
    """A function that returns zeros to be added to the sites of `fn`, by name.

    Each has the shape of what a capture returns: one for every iteration, example and device. Sites
    that are no floating-point numbers, or in a while loop, have none.
    """
    check_function(fn, "perturbations")
    plan = Plan.make(at, None, modules=modules, names=_AT)
    call = Instrumented(fn, _Perturbing(plan))

    @functools.wraps(fn, updated=())
    def zeros(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        program, arrays = call.program(args, kwargs)
        spots = _differentiable(survey(program, plan, arrays), plan)
        return {spot.site.name: _zeros(spot) for spot in spots}

    return zeros


def perturbed(
    fn: Callable[..., Any], at: Selection = "**", *, modules: Any = True
) -> Callable[..., Any]:
    """A function like `fn` that takes perturbations first, and adds them to the values of sites.

    They are given by the names of the sites, not all of which must have one. Sites that a rule such
    as `jt.ops` makes have to be selected here too.
    """
    check_function(fn, "perturbed")
    call = Instrumented(fn, _Perturbing(Plan.make(at, None, modules=modules, names=_AT)))

    @functools.wraps(fn, updated=())
    def added(perturbations: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(perturbations, Mapping):
            raise TypeError(
                "The first argument of a perturbed function is a dict of perturbations by the "
                f"names of sites, but it is of type {type(perturbations).__name__}."
            )
        return call({k: jnp.asarray(v) for k, v in perturbations.items()}, args, kwargs)

    return added


def jacobian(
    fn: Callable[P, Any], of: str | None, wrt: str, *, modules: Any = True
) -> Callable[P, Any]:
    """A function that returns the derivative of one site by another, or of what `fn` returns.

    The axes of `of` come first, then those of `wrt`. It goes forward or backward, whichever takes
    fewer passes.
    """
    check_function(fn, "jacobian")
    both = (wrt,) if of is None else (of, wrt)
    call = Instrumented(fn, _Jacobian(Plan.make(both, None, modules=modules, names=_WRT), of, wrt))

    @functools.wraps(fn, updated=())
    def derivative(*args: P.args, **kwargs: P.kwargs) -> Any:
        return call((), args, kwargs)

    return derivative


@dataclasses.dataclass(frozen=True)
class _Differentiating(Job):
    """Takes the gradient of the first result."""

    plan: Plan
    has_aux: bool

    def prepare(self, program: Program, operands: Any, arrays: Sequence[Any]) -> Any:
        outs = _compat.open_jaxpr(program.jaxpr).outvars
        kind = outs[0].aval if outs else None
        if kind is None or kind.shape or not jnp.issubdtype(kind.dtype, jnp.floating):
            what = "no array" if kind is None else f"{kind.dtype}{list(kind.shape)}"
            raise TypeError(
                f"A gradient is that of a loss, one real number, but the function returns {what} "
                "first. Return (loss, aux), and give has_aux=True, to return more."
            )
        return _differentiable(survey(program, self.plan, arrays, [0]), self.plan, reaching=True)

    def run(
        self, program: Program, prepared: Any, operands: Any, arrays: Sequence[Any], checked: bool
    ) -> Any:
        def loss(zeros: list[Any]) -> Any:
            changes = _adding(prepared, zeros, _inject)
            outs = program.run(Walk(Plan(None, None), changes), arrays)
            return outs[0], outs

        zeros = [jnp.zeros(spot.site.shape, spot.own.dtype) for spot in prepared]
        value, back, outs = jax.vjp(loss, zeros, has_aux=True)
        (grads,) = back(jnp.ones_like(value))
        names = (spot.site.name for spot in prepared)
        return outs, dict(zip(names, grads, strict=True))

    def finish(self, out: Any, extra: Any) -> Any:
        pair = isinstance(out, tuple) and len(out) == 2
        if pair != self.has_aux or not (pair or isinstance(out, jax.Array)):
            expected = "(loss, aux), as has_aux=True says" if self.has_aux else "the loss alone"
            raise TypeError(f"The function must return {expected}, but returns {type(out)}.")
        return out, extra


@jax.custom_jvp
def _inject(x: Any, zeros: Any) -> Any:
    """`x + zeros` without the addition, and so without the zeros."""
    del zeros
    return x


@functools.partial(_inject.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> Any:
    moved = [t for t in tangents if not isinstance(t, jax.custom_derivatives.SymbolicZero)]
    return primals[0], functools.reduce(jnp.add, moved) if moved else tangents[0]


def _adding(spots: Sequence[Spot], arrays: Sequence[Any], add: Callable[..., Any]) -> Changes:
    making = Making()
    for spot, array in zip(spots, arrays, strict=True):
        part = Part(array, spot.depths, len(spot.mapped))
        making.change(spot, lambda x, counter, part: add(x, part), [part])
    return making.changes()


@dataclasses.dataclass(frozen=True)
class _Perturbing(Job):
    """Adds the operands to the values of sites."""

    plan: Plan

    def prepare(self, program: Program, operands: Any, arrays: Sequence[Any]) -> Any:
        return _perturbed_spots(survey(program, self.plan, arrays), operands)

    def check(self, prepared: Any, operands: Any) -> None:
        for spot, array in zip(prepared, operands.values(), strict=True):
            _check_devices(spot, array)

    def run(
        self, program: Program, prepared: Any, operands: Any, arrays: Sequence[Any], checked: bool
    ) -> Any:
        changes = _adding(prepared, [operands[s.site.name] for s in prepared], jnp.add)
        return program.run(Walk(Plan(None, None), changes), arrays), ()


@dataclasses.dataclass(frozen=True, eq=False)
class Adding(Job):
    """Adds to the values of sites what `choose` gives, once it is known which there are."""

    plan: Plan
    choose: Callable[[SiteTable], Mapping[str, Any]]

    def prepare(self, program: Program, operands: Any, arrays: Sequence[Any]) -> Any:
        return survey(program, self.plan, arrays)

    def run(
        self, program: Program, prepared: Any, operands: Any, arrays: Sequence[Any], checked: bool
    ) -> Any:
        chosen = self.choose(SiteTable([spot.site for spot in prepared]))
        spots = _perturbed_spots(prepared, chosen)
        changes = _adding(spots, list(chosen.values()), jnp.add)
        return program.run(Walk(Plan(None, None), changes), arrays), ()


@dataclasses.dataclass(frozen=True)
class _Jacobian(Job):
    """Takes the derivative of one site, or of the results, by another."""

    plan: Plan
    of: str | None
    wrt: str
    stateless = True

    def prepare(self, program: Program, operands: Any, arrays: Sequence[Any]) -> Any:
        spots = survey(program, self.plan, arrays)
        one = lambda name: _only([s for s in spots if matches(name, s.site)], name)  # noqa: E731
        wrt = one(self.wrt)
        _differentiable([wrt], Plan.make(self.wrt, None))
        return wrt, None if self.of is None else one(self.of)

    def run(
        self, program: Program, prepared: Any, operands: Any, arrays: Sequence[Any], checked: bool
    ) -> Any:
        wrt, of = prepared
        plan = Plan(None if of is None else of.site.name, None)

        def inner(zeros: Any) -> Any:
            outs, taps = program.walk(plan, arrays, _adding([wrt], [zeros], _inject))
            return outs if of is None else taps.values[of.site.name]

        zeros = jnp.zeros(wrt.site.shape, wrt.own.dtype)
        results = jax.tree.leaves(jax.eval_shape(inner, zeros))
        forward = math.prod(wrt.site.shape) < sum(math.prod(x.shape) for x in results)
        made = (jax.jacfwd if forward else jax.jacrev)(inner)(zeros)
        return (made, ()) if of is None else (None, made)

    def finish(self, out: Any, extra: Any) -> Any:
        return out if self.of is None else extra


def _only(spots: Sequence[Spot], name: str) -> Spot:
    if len(spots) == 1:
        return spots[0]
    names = ", ".join(repr(f"{s.site.path}@{s.site.call}") for s in spots)
    raise SiteError(
        f"{name!r} is the name of {len(spots)} sites, but must be that of one: {names}."
    )


def _differentiable(spots: Sequence[Spot], plan: Plan, *, reaching: bool = False) -> list[Spot]:
    """Those sites by which a derivative can be taken; raises for one that is named exactly."""
    exact = [part for part in flatten(plan.values) if is_exact(part)]
    kept = []
    for spot in spots:
        why = _why_not(spot, reaching)
        if why is None:
            kept.append(spot)
        elif any(matches(name, spot.site) for name in exact):
            site = spot.site
            raise SiteError(
                f"There is no derivative by the site {site.name!r}, marked at {site.source}: {why}."
            )
    return kept


def _why_not(spot: Spot, reaching: bool) -> str | None:
    if not jnp.issubdtype(spot.own.dtype, jnp.inexact):
        return f"its values are of type {spot.own.dtype}, which cannot be differentiated"
    if any(a.kind == "while" for a in spot.around):
        return (
            "it is in a while loop, which may reach it any number of times. A loop with a known "
            "number of iterations, a scan or a fori_loop, has one for each"
        )
    if reaching and not spot.reaches:
        return (
            "the loss does not depend on it. Use what jt.sow returned in the place of the value "
            "that it was given"
        )
    return None


def _zeros(spot: Spot) -> Any:
    zeros = jnp.zeros(spot.site.shape, spot.own.dtype)
    sharding = _sharding(spot)
    return zeros if sharding is None else jax.device_put(zeros, sharding)


def _sharding(spot: Spot) -> Any:
    """Where the parts of a perturbation lie that devices of a mesh have each their own of."""
    names = [None if a.is_loop else a.kind for a in (spot.around[d] for d in spot.depths)]
    if spot.mesh is None or not any(names):
        return None
    return NamedSharding(spot.mesh, PartitionSpec(*names))


def _perturbed_spots(spots: Sequence[Spot], perturbations: Mapping[str, Any]) -> list[Spot]:
    """The sites that perturbations are for; raises for one that does not fit."""
    known = {spot.site.name: spot for spot in spots}
    for name, array in perturbations.items():
        if name not in known:
            raise SiteError(
                f"There is a perturbation of {name!r}, but no such site was reached when the "
                f"function was traced. {nearest(name, known)}"
            )
        _check_perturbation(known[name], array)
    return [known[name] for name in perturbations]


def _check_perturbation(spot: Spot, array: Any) -> None:
    site = spot.site
    where = f"The perturbation of the site {site.name!r}, marked at {site.source},"
    why_not = _why_not(spot, reaching=False)
    if why_not is not None:
        raise SiteError(f"{where} cannot be added: {why_not}.")
    if array.shape != site.shape:
        raise SiteError(
            f"{where} has shape {list(array.shape)}, but its values have shape {list(site.shape)}. "
            "Make perturbations with the arguments that they are for."
        )
    if array.dtype != spot.own.dtype:
        raise SiteError(
            f"{where} is of type {array.dtype}, but its values are of type {spot.own.dtype}: the "
            "sum would be of another type than the value. Cast the perturbation."
        )


def _check_devices(spot: Spot, array: Any) -> None:
    wanted = _sharding(spot)
    if wanted is None or not getattr(array, "committed", False):
        return
    if array.sharding.device_set != wanted.device_set:
        raise SiteError(
            f"The perturbation of the site {spot.site.name!r}, marked at {spot.site.source}, has "
            f"the sharding {array.sharding}, but its values have {wanted}. Make perturbations with "
            "jt.perturbations, or put them there with jax.device_put."
        )
