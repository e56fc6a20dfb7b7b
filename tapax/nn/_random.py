"""Functions of a random key, which perturb the values or the weights of a model for each key.

A perturbation is an edit whose function draws random numbers: an edit of the values of some sites,
or of the weights, the arrays that enter the program. All keys of an ensemble are one `jax.vmap`, in
which the part of the program that no perturbation reaches runs once for all members.

The n-th perturbed array draws with `jax.random.fold_in(key, n)`. Perturbations count in the order
in which they were added, their sites in the order of the program, and weights in the order of the
model. For a site in a scan, a map or a mesh that key is split, one for each iteration, example and
device, even if only some of them are perturbed.
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
    """A function of a random key and of the arguments of `fn`, which perturbs `fn` with that key.

    `dropout`, `noise`, `weight_noise` and `subensemble` make it, and accept it, too. Equal keys
    give equal results. Objects that `fn` changes, such as the statistics of a model, do not change.

    Args:
        fn: The function without perturbations.
        perturbations: The perturbations, in the order in which they apply.
        trunk: Selects the site at which a shared trunk ends, as in `subensemble`.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def model(w, x):
        ...     return tapax.sow(jnp.tanh(x @ w["up"]), "h") @ w["out"]
        >>> w = {"up": jnp.ones((3, 8)), "out": jnp.ones((8, 2))}
        >>> noisy = tapax.nn.dropout(tapax.nn.weight_noise(model, 0.1), at="h", rate=0.5)
        >>> noisy(jax.random.key(0), w, jnp.array([0.5, -1.0, 2.0])).shape  # one member
        (2,)
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
        transforms = (_PerturbTransform(plan, self.perturbations, plain) for plain in (False, True))
        self._whole, self._whole_after_plain = (TransformedFunction(fn, t) for t in transforms)
        self._from_trunk = compiled(self._draw_from_trunk)

    def __call__(self, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn`, perturbed with one key."""
        return self._draw(check_key(key), args, kwargs)

    def sample(self, key: Any, num_members: int, /, *args: Any, **kwargs: Any) -> Any:
        """Run several members in one program, and stack their results.

        Args:
            key: A random key. Member `i` uses `jax.random.split(key, num_members)[i]`.
            num_members: The number of members.
            *args: The arguments of `fn`.
            **kwargs: The keyword arguments of `fn`.

        Returns:
            The results of `fn`, with a new first axis of members.

        Raises:
            TypeError: If `key` is not one random key, or `num_members` not an integer.
            ValueError: If `num_members` is not positive.
            SiteError: If a perturbation selects no site, or one that it cannot perturb.

        Example:
            >>> import jax, jax.numpy as jnp, tapax
            >>> noisy = tapax.nn.noise(lambda x: tapax.sow(x, "h"), at="h", std=2.0)
            >>> out = noisy.sample(jax.random.key(0), 1000, jnp.array([1.0, 5.0]))
            >>> out.shape, [round(float(x)) for x in out.mean(0)]
            ((1000, 2), [1, 5])
        """
        keys = jax.random.split(check_key(key), check_members(num_members))
        return self._draw(keys, args, kwargs)

    def sample_after_plain(self, key: Any, num_members: int, /, *args: Any, **kwargs: Any) -> Any:
        """Run several members, as `sample` does, with the plain `fn` as the first member.

        Args:
            key: A random key, as in `sample`.
            num_members: The number of members, including the plain one.
            *args: The arguments of `fn`.
            **kwargs: The keyword arguments of `fn`.

        Returns:
            The results of `fn`, with a new first axis of members.

        Raises:
            TypeError: If `key` is not one random key, or `num_members` not an integer.
            ValueError: If `num_members` is not positive.
            SiteError: If a perturbation selects no site, or one that it cannot perturb.

        Example:
            >>> import jax, jax.numpy as jnp, tapax
            >>> noisy = tapax.nn.noise(lambda x: tapax.sow(x, "h"), at="h", std=2.0)
            >>> out = noisy.sample_after_plain(jax.random.key(0), 3, jnp.array([1.0, 5.0]))
            >>> out[0].tolist(), bool((out[1] == out[0]).any())
            ([1.0, 5.0], False)
        """
        keys = jax.random.split(check_key(key), check_members(num_members))
        return self._draw(keys, args, kwargs, plain_first=True)

    def extend(self, perturbation: Perturbation) -> RandomFunction:
        """Make a function with one more perturbation, after the others.

        Args:
            perturbation: A perturbation, as in the `perturbations` of another `RandomFunction`.

        Returns:
            A new `RandomFunction`.

        Raises:
            SiteError: When the new function is called, if the perturbation selects nothing that can
                be perturbed.

        Example:
            >>> import jax, tapax
            >>> f = lambda x: tapax.sow(x, "h")
            >>> noisy, dropped = tapax.nn.noise(f, "h", 0.1), tapax.nn.dropout(f, "h", 0.5)
            >>> both = noisy.extend(dropped.perturbations[0])
            >>> [type(p).__name__ for p in both.perturbations]
            ['Noise', 'Dropout']
        """
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
        """Find the weights for each perturbation of weights, by path."""
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
                f"`params` says that argument {number} of {name_of(fn)} contains the weights, but "
                f"it was called with {len(args)} positional arguments."
            )
        model = args[number]
        if noise.params is None and isinstance(model, (jax.Array, np.ndarray)):
            raise TypeError(
                f"The first argument of the function {name_of(fn)} is an array, which may be data. "
                "Pass the model as an argument, and say which one it is: "
                "tapax.nn.weight_noise(fn, ..., params=0)."
            )
    weights = find_weights(model)
    found = {path: x for path, x in weights.items() if matches(noise.at, Site(path))}
    if not weights:
        raise ValueError(
            f"The {type(model).__name__} that {name_of(fn)} takes as its model contains no "
            "weights, no arrays of real or complex numbers. Give the right argument with `params`."
        )
    if not found:
        some = ", ".join(map(repr, list(weights)[:5])) + (" ..." if len(weights) > 5 else "")
        raise SiteError(f"`at` is {noise.at!r}, which matches no weight. The weights are {some}.")
    return found


@dataclasses.dataclass(frozen=True)
class _PerturbTransform(Transform):
    """The transform that runs a program with perturbations, for one key or for several keys.

    The results for several keys are stacked.
    """

    plan: Plan
    perturbations: tuple[Perturbation, ...]
    plain_first: bool
    stateless = True

    def prepare(self, call: TracedCall) -> list[Any]:
        """Find the values of each perturbation of sites, and the arrays of each of weights."""
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
                    drawn = jax.random.fold_in(key, next(count))
                    if isinstance(one, _PerturbedValue):
                        one.perturb(builder, drawn)
                    elif one is not None:
                        arrays[one] = perturbation.apply(drawn, jnp.asarray(arrays[one]))
            return dataclasses.replace(call, arrays=arrays).run_changed(builder.changes())

        return _map_keys(member, call.operands[0], self.plain_first), ()


def _map_keys(member: Callable[[jax.Array | None], Any], keys: jax.Array, plain_first: bool) -> Any:
    """Run a member for one key, or for each of several keys, and stack the results.

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
    """Find the number of each weight among the arrays of a call; None for an unused weight."""
    places: dict[int, list[int]] = {}
    for i, x in enumerate(arrays):
        places.setdefault(id(x), []).append(i)
    # Two weights may happen to be one array, such as zeros: each takes a different place.
    found: list[int | None] = []
    for weight in weights.values():
        here = places.get(id(weight), [])
        found.append(here.pop(0) if here else None)
    if all(place is None for place in found):
        raise ValueError(
            f"The function closes over the weight {next(iter(weights))!r} and all others, so they "
            "are constants of its program. Pass the weights as an argument."
        )
    return found


@dataclasses.dataclass(frozen=True)
class _PerturbedValue:
    """The perturbed values of a site, as the target of an edit."""

    perturbation: Any
    rule: EditRule
    given: EditOperands
    target: Target

    def check(self) -> None:
        """Raise if the part of a value, or the iteration, does not exist."""
        target = self.target
        if self.rule.step is True:
            target.spot.check_step(int(self.given.step), target.loop)
        self.perturbation.check(target.site, self.rule.edited_type(target).shape)

    def perturb(self, builder: ChangeBuilder, key: jax.Array) -> None:
        """Add the perturbation to `builder`, with a key for each iteration, example and device."""
        spot = self.target.spot
        sizes = (*(a.size for a in spot.around if a.size is not None), *spot.mapped)
        keys = jax.random.split(key, math.prod(sizes)).reshape(sizes) if sizes else key
        # Pass the keys as data, because the walk cannot slice the axes of typed keys.
        part = Part(jax.random.key_data(keys), spot.depths, len(spot.mapped))
        kind = jax.random.key_impl(key)

        # The number of iterations of a while loop is not known, so its iterations share a key, into
        # which each folds its number.
        whiles = [depth for depth in spot.loops if spot.around[depth].kind is Kind.WHILE]

        def perturb(x: Value, counters: Counters, data: Value) -> Any:
            drawn = jax.random.wrap_key_data(data, impl=kind)
            for depth in whiles:
                drawn = jax.random.fold_in(drawn, counters[depth])
            return self.perturbation.apply(drawn, x)

        builder.change_edited(self.rule, self.target, self.given, perturb, [part], counted=whiles)


def _pick(perturbation: Any, spots: Sequence[Spot]) -> list[_PerturbedValue]:
    """Find the values that a perturbation changes; raise if it would do nothing."""
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
            f"The perturbation of the {numbers[0].target.site.described}, would change nothing, "
            "because its value never reaches a result of the function. Use the value that "
            "tapax.sow returns, instead of the value passed to it."
        )
    return numbers


def _not_real(spot: Spot) -> SiteError:
    return SiteError(
        f"The {spot.site.described}, has values of the dtype {spot.own.dtype}, but only real and "
        "complex numbers can be perturbed. Select other sites with `at`."
    )
