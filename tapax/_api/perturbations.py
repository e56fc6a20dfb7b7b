"""Perturbations: arrays that are added to the values of sites.

`perturbations` returns zeros for every call, iteration and example of a site. `perturbed` makes a
function that adds them to its sites, so that any derivative with respect to values inside a
function is the derivative of an ordinary function.
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
from tapax._api.change_builder import ChangeBuilder
from tapax._api.edit_rules import Target, targets_of, whole
from tapax._calling.program import TracedCall
from tapax._calling.survey import Spot, program_order, survey
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
    """Make a function that returns zero perturbations for the sites of `fn`, by name.

    Each perturbation has the shape of the captured array: it has an entry for every iteration,
    example and device. A site has no perturbation if its values are not floating-point numbers, if
    it is in a while loop or inside a function with a custom derivative rule, or if `fn` does not
    use it. A glob skips such a site.

    Args:
        fn: The function to perturb, jitted or not.
        at: Selects the sites, as in `tapax.capture`. It must not contain a `tapax.at`.
        modules: The modules whose results are sites, as in `tapax.capture`.

    Returns:
        A function of the arguments of `fn` that returns a dict of zeros by the names of the sites.

    Raises:
        TypeError: If `fn` is not a function.
        SiteError: If `at` contains a `tapax.at`. When the returned function is called: if `at`
            names a site that has no perturbation, or is a glob none of whose sites has one.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def loss(w, x):
        ...     h = tapax.sow(w * x, "h")
        ...     return jnp.sum(h**2)
        >>> x = jnp.array([1.0, 3.0])
        >>> zeros = tapax.perturbations(loss)(2.0, x)
        >>> zeros["h"].shape
        (2,)
        >>> jax.hessian(tapax.perturbed(loss))(zeros, 2.0, x)["h"]["h"].tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    check_function(fn, "perturbations")
    _refuse_steps(at)
    plan = Plan.make(at, None, modules=modules, replacing=True, names=AT)
    call = TransformedFunction(fn, _PerturbationTransform(plan))

    @functools.wraps(fn, updated=())
    def zeros(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        found = survey(call.traced_call(args, kwargs), plan)
        spots = differentiable(found, plan, reaching=True)
        targets = [target for spot in spots for target in targets_of(plan.values, spot)]
        place = program_order(spots)
        # The loops of a target are innermost first.
        targets.sort(key=lambda t: place(t.spot, tuple(n for _, n in reversed(t.layers))))
        return SiteDict((target.name, _zeros(target)) for target in targets)

    return zeros


def perturbed(
    fn: Callable[..., Any], at: Selection = "**", *, modules: Any = True
) -> Callable[..., Any]:
    """Make a function like `fn` that takes perturbations first, and adds them to its sites.

    Args:
        fn: The function to perturb, jitted or not.
        at: Selects the sites that can be perturbed. It is needed only for sites that a rule marks,
            such as `tapax.ops("dot_general")`.
        modules: The modules whose results are sites, as in `tapax.capture`.

    Returns:
        A function of a dict of perturbations by the names of sites, followed by the arguments of
        `fn`. It returns the result of `fn`. A site without a perturbation stays as it is.

    Raises:
        TypeError: If `fn` is not a function, or, when the returned function is called, if its first
            argument is not a dict of arrays.
        SiteError: If `at` contains a `tapax.at`. When the returned function is called: if a name in
            the dict is not the name of a site, or if a perturbation has the wrong shape, dtype or
            sharding.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def loss(w, x):
        ...     h = tapax.sow(w * x, "h")
        ...     return jnp.sum(h**2)
        >>> x = jnp.array([1.0, 3.0])
        >>> float(tapax.perturbed(loss)({"h": jnp.array([0.5, 0.0])}, 2.0, x) - loss(2.0, x))
        2.25
    """
    check_function(fn, "perturbed")
    _refuse_steps(at)
    call = TransformedFunction(
        fn, _PerturbationTransform(Plan.make(at, None, modules=modules, replacing=True, names=AT))
    )

    @functools.wraps(fn, updated=())
    def added(perturbations: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(perturbations, Mapping):
            raise TypeError(
                "The first argument of a perturbed function must be a dict of perturbations by the "
                f"names of sites, but is of type {type(perturbations).__name__}."
            )
        given = {
            name: as_array(x, f"The perturbation of the site {name!r}")
            for name, x in perturbations.items()
        }
        return call(given, args, kwargs)

    return added


@dataclasses.dataclass(frozen=True)
class _PerturbationTransform(Transform):
    """The transform that adds the operands to the values of sites."""

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
                    "tapax.perturbations, or give them that sharding with jax.device_put."
                )

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        arrays = [call.operands[target.name] for target in prepared]
        return call.run_changed(adding(prepared, arrays, jnp.add)), ()


@dataclasses.dataclass(frozen=True, eq=False)
class AdditionTransform(Transform):
    """The transform that adds arrays to values; `choose` makes them from the table of sites."""

    plan: Plan
    choose: Callable[[SiteTable], Mapping[str, Any]]

    def prepare(self, call: TracedCall) -> Any:
        return survey(call, self.plan)

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        chosen = self.choose(SiteTable([spot.site for spot in prepared]))
        targets = _perturbed_targets(prepared, chosen)
        return call.run_changed(adding(targets, list(chosen.values()), jnp.add)), ()


def adding(targets: Iterable[Target], arrays: Sequence[Any], add: Callable[..., Any]) -> Changes:
    """Make the changes that add an array to the values of each target, with the function `add`."""
    builder = ChangeBuilder()
    for target, array in zip(targets, arrays, strict=True):
        part = Part(array, target.depths, len(target.spot.mapped))
        builder.change_target(target, add, [part])
    return builder.changes()


def differentiable(
    spots: Sequence[Spot], plan: Plan, *, reaching: bool = False, some: bool = False
) -> list[Spot]:
    """List the sites with respect to which a derivative exists.

    Raise for a site that is named exactly and has no derivative, and for a glob none of whose sites
    has one; for `"**"` only with `some`.
    """
    kept, left = [], list[tuple[Spot, str]]()
    for spot in spots:
        shielded = f"{spot.site.name!r} is inside {spot.shield}" if spot.shield else None
        why = shielded or _why_not(spot, reaching)
        if why is None:
            kept.append(spot)
        elif plan.names_value(spot.site):
            raise SiteError(
                f"There is no derivative with respect to the {spot.site.described}: {why}."
            )
        else:
            left.append((spot, why))
    for part in flatten(plan.values):
        out = [(spot, why) for spot, why in left if matches(part, spot.site)]
        asked = some or part != "**"
        if asked and out and not any(matches(part, spot.site) for spot in kept):
            spot, why = out[0]
            raise SiteError(
                f"There is no derivative with respect to any site that {plan.names[0]}={part!r} "
                f"picks. For the {spot.site.described}, the reason is: {why}."
            )
    return kept


def _why_not(spot: Spot, reaching: bool) -> str | None:
    """Return the reason why a site has no derivative; None if it has one."""
    if not jnp.issubdtype(spot.own.dtype, jnp.inexact):
        return f"its values are of type {spot.own.dtype}, which cannot be differentiated"
    if any(a.kind is Kind.WHILE for a in spot.around):
        return (
            "it is in a while loop, whose number of iterations is not known in advance. Use a loop "
            "with a known number of iterations: a scan or a fori_loop"
        )
    if reaching and not spot.reaches:
        return (
            "the result of the function does not depend on it. Use the value that tapax.sow "
            "returns, instead of the value passed to it"
        )
    return None


def zeros_at(target: Target) -> Any:
    """Make zeros of the type of the array that a capture of a target returns."""
    return _jax.with_spec(jnp.zeros(target.shape, target.spot.own.dtype), target.spec)


def _zeros(target: Target) -> Any:
    zeros, sharding = zeros_at(target), _sharding(target)
    return zeros if sharding is None else jax.device_put(zeros, sharding)


def _sharding(target: Target) -> Any:
    """Return the sharding of a perturbation whose values differ between devices; None otherwise."""
    around = [target.spot.around[depth] for depth in target.depths]
    names = [None if a.is_loop else a.name for a in around]
    if not isinstance(target.spot.mesh, Mesh) or not any(names):
        return None
    return NamedSharding(target.spot.mesh, PartitionSpec(*names))


def _refuse_steps(at: Selection) -> None:
    for part in flatten(check(at, "at")):
        if isinstance(part, At):
            raise SiteError(
                f"tapax.{part} selects a part of a value, but a perturbation has an entry for "
                "every iteration of a loop and every element of a value. Select the whole site, "
                "and leave the other entries zero."
            )


def _perturbed_targets(
    spots: Sequence[Spot], perturbations: Mapping[str, Any], *, reaching: bool = False
) -> list[Target]:
    """List the targets of perturbations; raise for a perturbation that does not fit its target."""
    known = {spot.site.name: whole(spot) for spot in spots}
    found: list[Target] = []
    for name, array in perturbations.items():
        layers = (target for spot in spots for target in targets_of(name, spot))
        target = known.get(name) or next(layers, None)
        if target is None:
            raise SiteError(
                f"There is a perturbation of {name!r}, but the function did not reach such a site. "
                f"{nearest(name, known)}"
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
            f"{list(target.shape)}. Make perturbations with the arguments of this call."
        )
    if array.dtype != spot.own.dtype:
        raise SiteError(
            f"{where} is of type {array.dtype}, but its values are of type {spot.own.dtype}: "
            "adding it could change the type of the value. Cast the perturbation."
        )
