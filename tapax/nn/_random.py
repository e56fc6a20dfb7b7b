"""Functions of a random key: a model whose values or weights are perturbed anew for each key.

A perturbation is an edit whose function draws: of the values of some sites, or of the weights, the
arrays that enter the program. All keys of an ensemble are one `jax.vmap`, in which a part of the
program that no perturbation reaches is computed once for all members.

The n-th thing that is perturbed, of all perturbations in the order in which they were added, and of
each in the order of the program (weights: in that of the model), draws with
`jax.random.fold_in(key, n)`. A site in a scan, a map or a mesh has that key split, one for each
iteration, example and device, be it perturbed in all of them or in some.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._api.change_builder import ChangeBuilder
from tapax._api.cut import prefix, suffix
from tapax._api.edit_rules import Counters, EditOperands, EditRule, Target, make_rule
from tapax._calling.program import TracedCall
from tapax._calling.survey import Spot, survey
from tapax._calling.transform import Transform, TransformedFunction
from tapax._jax import PyTree, Value
from tapax._jaxpr.kinds import Kind
from tapax._sites import Selection, Site, SiteError, flatten, is_exact, matches, name_of, show
from tapax._walk.changes import Part
from tapax._walk.plan import Plan
from tapax.nn._arguments import check_key, check_members
from tapax.nn._compilation import compiled
from tapax.nn._perturbations import Perturbation, WeightNoise
from tapax.nn._weights import find_weights, model_of


class RandomFunction:
    """A function of a random key and of the arguments of `fn`, which perturbs `fn` for that key.

    `dropout`, `noise`, `weight_noise` and `subensemble` make these, also from one another. Equal
    keys give equal results. `fn` is the function without perturbations. Objects that `fn` changes,
    such as the statistics of a model, stay as they are.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        perturbations: Sequence[Perturbation],
        trunk: Selection | None = None,
    ):
        self.fn = fn
        self.perturbations = tuple(perturbations)
        self.trunk = trunk
        sites = tuple(
            s for p in self.perturbations if not isinstance(p, WeightNoise) for s in p.sites
        )
        plan = Plan.make(sites, None, changing=True, names=("at", ""))
        transforms = (_Perturb(plan, self.perturbations, plain) for plain in (False, True))
        self._whole, self._whole_after_plain = (TransformedFunction(fn, t) for t in transforms)
        self._from_trunk = compiled(self._draw_from_trunk)

    def __call__(self, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What `fn` returns, perturbed by one key."""
        return self._draw(check_key(key), args, kwargs)

    def sample(self, key: Any, num_members: int, /, *args: Any, **kwargs: Any) -> Any:
        """What several members return, each perturbed by its own key, stacked.

        The keys are those of `jax.random.split(key, num_members)`.
        """
        keys = jax.random.split(check_key(key), check_members(num_members))
        return self._draw(keys, args, kwargs)

    def sample_after_plain(self, key: Any, num_members: int, /, *args: Any, **kwargs: Any) -> Any:
        """As `sample`, but the first member is `fn` without perturbations."""
        keys = jax.random.split(check_key(key), check_members(num_members))
        return self._draw(keys, args, kwargs, plain_first=True)

    def extend(self, perturbation: Perturbation) -> RandomFunction:
        """A function with one more perturbation."""
        return RandomFunction(self.fn, (*self.perturbations, perturbation), self.trunk)

    def __repr__(self) -> str:
        done = ", ".join(map(repr, self.perturbations))
        return f"{type(self).__name__}({name_of(self.fn)}, {done})"

    def _draw(
        self,
        keys: jax.Array,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plain_first: bool = False,
    ) -> Any:
        if self.trunk is not None:
            return self._from_trunk(keys, args, kwargs, plain_first)
        draw = self._whole_after_plain if plain_first else self._whole
        return draw((keys, self._find_weights(args)), args, kwargs)

    def _draw_from_trunk(
        self, keys: jax.Array, args: tuple[Any, ...], kwargs: dict[str, Any], plain_first: bool
    ) -> Any:
        assert self.trunk is not None
        value = prefix(self.fn, self.trunk)(*args, **kwargs)
        whole = RandomFunction(self.fn, self.perturbations)

        def member(key: jax.Array | None) -> Any:
            branch = self.fn if key is None else functools.partial(whole, key)
            return suffix(branch, self.trunk)(value, *args, **kwargs)

        return _map_keys(member, keys, plain_first)

    def _find_weights(self, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        """The weights for each perturbation of weights, by path."""
        noises = [p for p in self.perturbations if isinstance(p, WeightNoise)]
        return [_select_weights(noise, self.fn, args) for noise in noises]


def _select_weights(
    noise: WeightNoise, fn: Callable[..., Any], args: tuple[Any, ...]
) -> dict[str, Any]:
    model = model_of(fn) if noise.params is None else None
    if model is None:
        number = noise.params or 0
        if not -len(args) <= number < len(args):
            raise TypeError(
                f"The weights are argument {number} of {name_of(fn)}, which was given {len(args)} "
                "positional arguments."
            )
        model = args[number]
        if noise.params is None and isinstance(model, (jax.Array, np.ndarray)):
            raise TypeError(
                f"{name_of(fn)} is a function, and its first argument an array, which may be data. "
                "Give it the model as an argument, and say which one that is: "
                "tapax.nn.weight_noise(fn, ..., params=0)."
            )
    weights = find_weights(model)
    found = {path: x for path, x in weights.items() if matches(noise.at, Site(path))}
    if not weights:
        raise ValueError(
            f"There are no weights in the {type(model).__name__} that {name_of(fn)} takes them "
            "from: no arrays of real or complex numbers."
        )
    if not found:
        some = ", ".join(map(repr, list(weights)[:5])) + (" ..." if len(weights) > 5 else "")
        raise SiteError(f"`at` is {noise.at!r}, which matches no weight. The weights are {some}.")
    return found


@dataclasses.dataclass(frozen=True)
class _Perturb(Transform):
    """Runs a program with perturbations: for one key, or for several, stacked."""

    plan: Plan
    perturbations: tuple[Perturbation, ...]
    plain_first: bool
    stateless = True

    def prepare(self, call: TracedCall) -> list[Any]:
        """The spots of each perturbation of sites; of weights, the numbers of their arrays."""
        weights = iter(call.operands[1])
        spots = survey(call, self.plan) if self.plan.values else []
        prepared: list[Any] = []
        for perturbation in self.perturbations:
            if isinstance(perturbation, WeightNoise):
                prepared.append(_find_arrays(next(weights), call.arrays))
            else:
                prepared.append(_pick(perturbation, spots))
        return prepared

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        def member(key: jax.Array | None) -> Any:
            arrays, builder, count = list(call.arrays), ChangeBuilder(), itertools.count()
            if key is None:
                return call.run_changed(builder.changes())
            for perturbation, picked in zip(self.perturbations, prepared, strict=True):
                for one in picked:
                    own = jax.random.fold_in(key, next(count))
                    if isinstance(one, _PerturbedValue):
                        one.perturb(builder, own)
                    elif one is not None:
                        arrays[one] = perturbation.apply(own, jnp.asarray(arrays[one]))
            return dataclasses.replace(call, arrays=arrays).run_changed(builder.changes())

        return _map_keys(member, call.operands[0], self.plain_first), ()


def _map_keys(member: Callable[[jax.Array | None], Any], keys: jax.Array, plain_first: bool) -> Any:
    """What a member returns for one key, or for each of several, stacked.

    If `plain_first`, the first member has no key, and no perturbations.
    """
    if not keys.ndim:
        return member(keys)
    if not plain_first:
        return jax.vmap(member)(keys)
    plain = jax.tree.map(lambda x: x[None], member(None))
    if len(keys) == 1:
        return plain
    others = jax.vmap(member)(keys[1:])
    return jax.tree.map(lambda *both: jnp.concatenate(both), plain, others)


def _find_arrays(weights: Mapping[str, Any], arrays: Sequence[Any]) -> list[int | None]:
    """Which array of a call each weight is; None for one that the call does not use."""
    places: dict[int, list[int]] = {}
    for i, x in enumerate(arrays):
        places.setdefault(id(x), []).append(i)
    # Two weights may be one array by chance, as zeros are: each has a place of its own.
    found: list[int | None] = []
    for weight in weights.values():
        here = places.get(id(weight), [])
        found.append(here.pop(0) if here else None)
    if all(place is None for place in found):
        raise ValueError(
            f"The weight {next(iter(weights))!r} is fixed in the function, which closes over it, "
            "and so are all others. Give the function its weights as an argument."
        )
    return found


@dataclasses.dataclass(frozen=True)
class _PerturbedValue:
    """The values of a site that are perturbed, as the target of an edit."""

    perturbation: Any
    rule: EditRule
    given: EditOperands
    target: Target

    def check(self) -> None:
        """Raises for a part of a value, or an iteration, that there is not."""
        target = self.target
        if self.rule.step is True:
            target.spot.check_step(int(self.given.step), target.loop)
        self.perturbation.check(target.site, self.rule.edited_type(target).shape)

    def perturb(self, builder: ChangeBuilder, key: jax.Array) -> None:
        """Has the values perturbed, with a key for each iteration, example and device."""
        spot = self.target.spot
        sizes = (*(a.size for a in spot.around if a.size is not None), *spot.mapped)
        keys = jax.random.split(key, math.prod(sizes)).reshape(sizes) if sizes else key
        # As data: the axes of a typed key are those that its implementation hides.
        part = Part(jax.random.key_data(keys), spot.depths, len(spot.mapped))
        kind = jax.random.key_impl(key)

        # How often a while loop runs is not known, so its iterations share the key they are given.
        whiles = [depth for depth in spot.loops if spot.around[depth].kind is Kind.WHILE]

        def perturb(x: Value, counters: Counters, data: Value) -> Any:
            own = jax.random.wrap_key_data(data, impl=kind)
            for depth in whiles:
                own = jax.random.fold_in(own, counters[depth])
            return self.perturbation.apply(own, x)

        builder.change_edited(self.rule, self.target, self.given, perturb, [part], counted=whiles)


def _pick(perturbation: Any, spots: Sequence[Spot]) -> list[_PerturbedValue]:
    """What a perturbation is for; raises if it would do nothing."""
    at = perturbation.at
    rules = [make_rule("value", part, perturbation.apply) for part in flatten(at)]
    found: dict[Hashable, _PerturbedValue] = {}
    for spot in spots:
        for rule, given in rules:
            for target in rule.targets(spot):
                # Two selections may pick the same part of the same values.
                key = target.name, rule.step, rule.index, given.step
                found.setdefault(key, _PerturbedValue(perturbation, rule, given, target))
    picked = list(found.values())
    numbers: list[_PerturbedValue] = []
    for one in picked:
        if jnp.issubdtype(one.target.spot.own.dtype, jnp.inexact):
            one.check()
            numbers.append(one)
        elif is_exact(one.rule.selection):
            raise _not_real(one.target.spot)
    if not picked:
        raise SiteError(f"`at` is {show(at)}, which picks no site.")
    if not numbers:
        raise _not_real(picked[0].target.spot)
    if not any(one.target.spot.reaches for one in numbers):
        raise SiteError(
            f"The {numbers[0].target.site.described}, is perturbed, but its value never reaches a "
            "result of the function, so nothing would change. Use what tapax.sow returned in the "
            "place of the value that it was given."
        )
    return numbers


def _not_real(spot: Spot) -> SiteError:
    return SiteError(
        f"The {spot.site.described}, has values of the dtype {spot.own.dtype}, but only real and "
        "complex numbers can be perturbed. Select other sites with `at`."
    )
