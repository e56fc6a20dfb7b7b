"""Perturbations: arrays that are added to the values of sites.

`perturbations` gives zeros, one for every call, iteration and example of a site; `perturbed` is the
function to whose sites they are added. So derivatives of any kind by values inside are those of an
ordinary function:

>>> import jax, jax.numpy as jnp, tapax
>>> def loss(w, x):
...     h = tapax.sow(w * x, "h")
...     return jnp.sum(h**2)
>>> x = jnp.array([1.0, 3.0])
>>> zeros = tapax.perturbations(loss)(2.0, x)
>>> jax.hessian(tapax.perturbed(loss))(zeros, 2.0, x)["h"]["h"].tolist()
[[2.0, 0.0], [0.0, 2.0]]
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tapax import _jax
from tapax._api.change_builder import ChangeBuilder, Target, targets_of, whole
from tapax._calling.program import TracedCall
from tapax._calling.survey import Spot, survey
from tapax._calling.transform import Transform, TransformedFunction, check_function
from tapax._jax import PyTree, Value
from tapax._jaxpr.kinds import Kind
from tapax._results import SiteDict, SiteTable
from tapax._sites import At, Selection, SiteError, as_array, check, flatten, matches, nearest
from tapax._walk.changes import Changes, Part
from tapax._walk.plan import Plan

P = ParamSpec("P")
AT = ("at", "")


def perturbations(
    fn: Callable[P, Any], at: Selection = "**", *, modules: Any = True
) -> Callable[P, dict[str, Any]]:
    """A function that returns zeros to be added to the sites of `fn`, by name.

    Each has the shape of what a capture returns: one for every iteration, example and device. Sites
    that are no floating-point numbers, in a while loop, inside a function with a derivative rule of
    its own, or dropped by `fn`, have none.
    """
    check_function(fn, "perturbations")
    _refuse_steps(at)
    plan = Plan.make(at, None, modules=modules, replacing=True, names=AT)
    call = TransformedFunction(fn, _PerturbationTransform(plan))

    @functools.wraps(fn, updated=())
    def zeros(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        found = survey(call.traced_call(args, kwargs), plan)
        spots = differentiable(found, plan, reaching=True)
        targets = (target for spot in spots for target in targets_of(plan.values, spot))
        return SiteDict((target.name, _zeros(target)) for target in targets)

    return zeros


def perturbed(
    fn: Callable[..., Any], at: Selection = "**", *, modules: Any = True
) -> Callable[..., Any]:
    """A function like `fn` that takes perturbations first, and adds them to the values of sites.

    They are given by the names of the sites, not all of which must have one. Sites that a rule such
    as `tapax.ops` makes have to be selected here too.
    """
    check_function(fn, "perturbed")
    _refuse_steps(at)
    call = TransformedFunction(
        fn, _PerturbationTransform(Plan.make(at, None, modules=modules, replacing=True, names=AT))
    )

    @functools.wraps(fn, updated=())
    def added(perturbations: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(perturbations, Mapping):
            raise TypeError(
                "The first argument of a perturbed function is a dict of perturbations by the "
                f"names of sites, but it is of type {type(perturbations).__name__}."
            )
        given = {
            name: as_array(x, f"The perturbation of the site {name!r}")
            for name, x in perturbations.items()
        }
        return call(given, args, kwargs)

    return added


@dataclasses.dataclass(frozen=True)
class _PerturbationTransform(Transform):
    """Adds the operands to the values of sites."""

    plan: Plan

    def prepare(self, call: TracedCall) -> Any:
        return _perturbed_targets(survey(call, self.plan), call.operands, reaching=True)

    def check(self, prepared: PyTree, operands: PyTree) -> None:
        for target, array in zip(prepared, operands.values(), strict=True):
            wanted = _sharding(target)
            if wanted is None or isinstance(array, Tracer) or not array.committed:
                continue
            if array.sharding.device_set != wanted.device_set:
                raise SiteError(
                    f"The perturbation of the {target.site.described}, has the sharding "
                    f"{array.sharding}, but its values have {wanted}. Make perturbations with "
                    "tapax.perturbations, or put them there with jax.device_put."
                )

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        arrays = [call.operands[target.name] for target in prepared]
        return call.run_changed(adding(prepared, arrays, jnp.add)), ()


@dataclasses.dataclass(frozen=True, eq=False)
class AdditionTransform(Transform):
    """Adds to the values of sites what `choose` gives, once it is known which there are."""

    plan: Plan
    choose: Callable[[SiteTable], Mapping[str, Any]]

    def prepare(self, call: TracedCall) -> Any:
        return survey(call, self.plan)

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        chosen = self.choose(SiteTable([spot.site for spot in prepared]))
        targets = _perturbed_targets(prepared, chosen)
        return call.run_changed(adding(targets, list(chosen.values()), jnp.add)), ()


def adding(targets: Iterable[Target], arrays: Sequence[Any], add: Callable[..., Any]) -> Changes:
    """The changes that add an array, by a function, to the values of each target."""
    builder = ChangeBuilder()
    for target, array in zip(targets, arrays, strict=True):
        part = Part(array, target.depths, len(target.spot.mapped))
        builder.change_target(target, add, [part])
    return builder.changes()


def differentiable(
    spots: Sequence[Spot], plan: Plan, *, reaching: bool = False, some: bool = False
) -> list[Spot]:
    """Those sites by which a derivative can be taken.

    Raises for one that is named exactly and has none, and for a glob if none of its sites has one;
    for `"**"` too, if there have to be `some`.
    """
    kept, left = [], list[tuple[Spot, str]]()
    for spot in spots:
        shielded = f"{spot.site.name!r} is inside {spot.shield}" if spot.shield else None
        why = shielded or _why_not(spot, reaching)
        if why is None:
            kept.append(spot)
        elif plan.names_value(spot.site):
            raise SiteError(f"There is no derivative by the {spot.site.described}: {why}.")
        else:
            left.append((spot, why))
    for part in flatten(plan.values):
        out = [(spot, why) for spot, why in left if matches(part, spot.site)]
        asked = some or part != "**"
        if asked and out and not any(matches(part, spot.site) for spot in kept):
            spot, why = out[0]
            raise SiteError(
                f"There is no derivative by any site that {plan.names[0]}={part!r} picks. Of the "
                f"{spot.site.described}, this is why: {why}."
            )
    return kept


def _why_not(spot: Spot, reaching: bool) -> str | None:
    if not jnp.issubdtype(spot.own.dtype, jnp.inexact):
        return f"its values are of type {spot.own.dtype}, which cannot be differentiated"
    if any(a.kind is Kind.WHILE for a in spot.around):
        return (
            "it is in a while loop, which may reach it any number of times. A loop with a known "
            "number of iterations, a scan or a fori_loop, has one for each"
        )
    if reaching and not spot.reaches:
        return (
            "what is returned does not depend on it. Use what tapax.sow returned in the place of "
            "the value that it was given"
        )
    return None


def zeros_at(target: Target) -> Any:
    """Zeros of the type of what a capture of a target returns."""
    return _jax.with_spec(jnp.zeros(target.shape, target.spot.own.dtype), target.spec)


def _zeros(target: Target) -> Any:
    zeros, sharding = zeros_at(target), _sharding(target)
    return zeros if sharding is None else jax.device_put(zeros, sharding)


def _sharding(target: Target) -> Any:
    """Where the parts of a perturbation lie that devices of a mesh have each their own of."""
    around = [target.spot.around[depth] for depth in target.depths]
    names = [None if a.is_loop else a.name for a in around]
    if not isinstance(target.spot.mesh, Mesh) or not any(names):
        return None
    return NamedSharding(target.spot.mesh, PartitionSpec(*names))


def _refuse_steps(at: Selection) -> None:
    for part in flatten(check(at, "at")):
        if isinstance(part, At):
            raise SiteError(
                f"tapax.{part} was given, but a perturbation has a part for every iteration of a "
                "loop and every entry of a value. Give the selection itself, and leave the other "
                "parts zero."
            )


def _perturbed_targets(
    spots: Sequence[Spot], perturbations: Mapping[str, Any], *, reaching: bool = False
) -> list[Target]:
    """The values that perturbations are for; raises for one that does not fit."""
    known = {spot.site.name: whole(spot) for spot in spots}
    found: list[Target] = []
    for name, array in perturbations.items():
        layers = (target for spot in spots for target in targets_of(name, spot))
        target = known.get(name) or next(layers, None)
        if target is None:
            raise SiteError(
                f"There is a perturbation of {name!r}, but no such site was reached when the "
                f"function was traced. {nearest(name, known)}"
            )
        _check_perturbation(target, array, reaching)
        found.append(target)
    return found


def _check_perturbation(target: Target, array: Value, reaching: bool) -> None:
    site, spot = target.site, target.spot
    where = f"The perturbation of the {site.described},"
    why_not = _why_not(spot, reaching)
    if why_not is not None:
        raise SiteError(f"{where} cannot be added: {why_not}.")
    if array.shape != target.shape:
        raise SiteError(
            f"{where} has shape {list(array.shape)}, but its values have shape "
            f"{list(target.shape)}. Make perturbations with the arguments that they are for."
        )
    if array.dtype != spot.own.dtype:
        raise SiteError(
            f"{where} is of type {array.dtype}, but its values are of type {spot.own.dtype}: the "
            "sum would be of another type than the value. Cast the perturbation."
        )
