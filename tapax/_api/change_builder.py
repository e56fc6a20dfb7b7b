"""How the rules of an edit become the changes of a walk: at one site, for one value.

A function is traced on the type of the value, which tells whether it keeps that type, and what
traced arrays it closes over: those have to be handed down to where the site is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr

from tapax import _jax
from tapax._calling.survey import Spot
from tapax._jax import Value
from tapax._jaxpr.leading_axes import where
from tapax._sites import (
    At,
    Index,
    LayerNumber,
    Selection,
    Site,
    SiteError,
    StepSlice,
    call_on_site,
    find,
    matches,
    show,
    takes_site,
)
from tapax._walk.changes import Change, Changes, Key, Part, PartKey

Counters: TypeAlias = Mapping[int, Any]
"""The numbers of the iterations of loops, by their depth."""


@dataclasses.dataclass(frozen=True)
class EditRule:
    """One edit: which sites, and by which function, or by an array if there is none.

    `step` is True if the edit is of one iteration, whose number is given; or it is a slice of them.
    `index` is the part of the value that is edited, if it is not the whole.
    """

    of: str
    selection: Selection
    fn: Callable[..., Any] | None
    step: bool | StepSlice = False
    index: Index | None = None

    def picks(self, spot: Spot) -> bool:
        return self.of == spot.key.of and matches(self.selection, spot.site)

    def targets(self, spot: Spot) -> Iterator[Target]:
        """The values of a site that are edited: all of them, or those of single layers."""
        return targets_of(self.selection, spot) if self.of == spot.key.of else iter(())

    def edited_type(self, target: Target) -> Any:
        """The type of what is edited of a value: of the whole, or of the part."""
        own = target.spot.own
        if self.index is None:
            return own
        return jax.ShapeDtypeStruct(self.index.check(own.shape, target.site), own.dtype)

    def __str__(self) -> str:
        argument = "values" if self.of == "value" else "grads"
        return f"{argument}={show(self.selection)}"


@dataclasses.dataclass(frozen=True)
class Target:
    """The values of a site that an edit is for.

    `layers` are the depths of loops over layers, with the number of the layer; `loop` is the depth
    of the innermost other loop.
    """

    spot: Spot
    site: Site
    layers: tuple[tuple[int, int], ...]
    loop: int | None

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def length(self) -> int | None:
        """The number of iterations of the loop; None if it is not known beforehand."""
        return None if self.loop is None else self.spot.around[self.loop].size

    @property
    def depths(self) -> tuple[int, ...]:
        """For which of what is around the site a captured value of the target has an axis."""
        return tuple(d for d in self.spot.depths if d not in dict(self.layers))

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of what a capture of the target returns."""
        sizes = (self.spot.around[d].size for d in self.depths)
        return (*sizes, *self.spot.mapped, *self.spot.own.shape)

    @property
    def spec(self) -> tuple[Any, ...]:
        """The axes of a mesh that each of its axes is divided over."""
        lead = dict(zip(self.spot.depths, self.spot.spec, strict=False))
        rest = self.spot.spec[len(self.spot.depths) :]
        return (*(lead[depth] for depth in self.depths), *rest)

    def is_now(self, counters: Counters) -> Any:
        """Tell whether the loops over layers are at the layers of the target."""
        now = [counters[depth] == number for depth, number in self.layers]
        return functools.reduce(jnp.logical_and, now, jnp.array(True))


def whole(spot: Spot) -> Target:
    """All values of a site."""
    return Target(spot, spot.site, (), spot.loop)


def targets_of(selection: Selection, spot: Spot) -> Iterator[Target]:
    """The values of a site that a selection picks: all of them, or those of single layers."""
    for found in find(selection, spot.site):
        layers = zip(spot.loops, found.steps, strict=False)
        pinned = tuple((depth, int(n)) for depth, n in layers if isinstance(n, LayerNumber))
        free = (depth for depth in spot.loops if depth not in dict(pinned))
        site = dataclasses.replace(spot.site, path=found.path)
        yield Target(spot, site, pinned, next(free, None))


class EditOperands(NamedTuple):
    """The arrays that an edit is given: a value, an iteration, the traced integers of an index."""

    array: Any = None
    step: Any = None
    numbers: tuple[Any, ...] = ()


def make_rule(
    of: str, part: Any, fn: Callable[..., Any] | None, array: Any = None
) -> tuple[EditRule, EditOperands]:
    """An edit of what one selection picks as a rule, and the arrays that it is given."""
    if not isinstance(part, At):
        return EditRule(of, part, fn), EditOperands(array)
    numbers = () if part.index is None else part.index.numbers
    index = None if part.index is None else part.index.with_numbers(())
    if part.step is None or isinstance(part.step, StepSlice):
        rule = EditRule(of, part.selection, fn, part.step or False, index)
        return rule, EditOperands(array, None, numbers)
    step = np.int32(part.step) if isinstance(part.step, int) else part.step
    return EditRule(of, part.selection, fn, True, index), EditOperands(array, step, numbers)


class ChangeBuilder:
    """Changes in the builder: those of each site, and their parts."""

    def __init__(self, checked: bool = True):
        self._checked = checked
        self._changes: dict[Key, list[Change]] = {}
        self._sites: dict[int, set[Key]] = {}
        self._parts: dict[Any, Part] = {}

    def changes(self) -> Changes:
        composed = {key: _composed(made) for key, made in self._changes.items()}
        return Changes(composed, self._sites, self._parts)

    def change(
        self,
        spot: Spot,
        fn: Callable[..., Any],
        parts: Sequence[Part],
        *,
        same: Hashable = None,
        counted: Iterable[int] = (),
    ) -> None:
        """Has the value of a site changed into `fn(x, counters, *parts)`, after other changes.

        Changes by functions that do the `same`, with the same parts, are equal. `counted` are the
        depths of the loops whose iterations `counters` numbers.
        """
        lie = tuple((id(part.array), part.depths, part.mapped) for part in parts)
        same = fn if same is None else same, lie
        keys = []
        for part in parts:
            keys.append(PartKey(spot.key, len(self._parts)))
            self._parts[keys[-1]] = part
        change = Change(same, fn, tuple(keys), frozenset(counted), spot.level)
        self._changes.setdefault(spot.key, []).append(change)
        self._sites.setdefault(spot.uid, set()).add(spot.key)

    def change_target(self, target: Target, fn: Callable[..., Any], parts: Sequence[Part]) -> None:
        """Has the values of a target changed into `fn(x, *parts)`."""

        def now(x: Value, counters: Counters, *parts: Any) -> Any:
            out = fn(x, *parts)
            return jnp.where(target.is_now(counters), out, x) if target.layers else out

        self.change(target.spot, now, parts, counted=dict(target.layers))

    def add(self, rule: EditRule, target: Target, given: EditOperands) -> None:
        """Has the values of a site changed as a rule says, with what is given for it."""
        own = rule.edited_type(target)
        if rule.fn is None:
            replace, parts = _by_array(rule, target, own, given.array)
        else:
            replace, parts = _by_function(rule.fn, target.site, own)
        same = rule, target.layers, target.site if rule.fn and takes_site(rule.fn) else None
        plainly = lambda x, counters, *parts: replace(x, *parts)  # noqa: E731
        self.change_edited(rule, target, given, plainly, parts, same=same)

    def change_edited(
        self,
        rule: EditRule,
        target: Target,
        given: EditOperands,
        fn: Callable[..., Any],
        parts: Sequence[Part],
        *,
        same: Hashable = None,
        counted: Iterable[int] = (),
    ) -> None:
        """Has what a rule edits of a value changed into `fn(x, counters, *parts)`.

        `x` is the part of the value that the rule is for, in the iterations that it is for.
        """
        replace, parts = _in_value(rule, target, given, fn, parts)
        if rule.step is False and not target.layers:
            self.change(target.spot, replace, parts, same=same, counted=counted)
            return
        traced = isinstance(given.step, Tracer) and not self._checked
        due = _due(rule, target, traced)
        steps = [] if rule.step is not True else [Part(jnp.asarray(given.step, jnp.int32))]

        def at_step(x: Value, counters: Counters, *rest: Any) -> Any:
            now, valid = due(counters, *rest[: len(steps)])
            rest = rest[len(steps) :]

            def change(x: Value, *rest: Any) -> Any:
                return _jax.like(replace(x, counters, *rest), jax.typeof(x))

            if rule.fn is None:
                out = jnp.where(now, change(x, *rest), x)
            else:
                out = jax.lax.cond(now, change, lambda x, *rest: x, x, *rest)
            return out if valid is None else _unless(valid, out)

        depths = [*counted, *(depth for depth, _ in target.layers)]
        if rule.step is not False:
            assert target.loop is not None
            depths.append(target.loop)
        self.change(target.spot, at_step, [*steps, *parts], same=same, counted=depths)


def _composed(changes: Sequence[Change]) -> Change:
    if len(changes) == 1:
        return changes[0]

    def fn(x: Value, counters: Counters, *parts: Any) -> Any:
        rest = iter(parts)
        for change in changes:
            x = change.fn(x, counters, *(next(rest) for _ in change.parts))
        return x

    keys = tuple(key for change in changes for key in change.parts)
    same = tuple(change.fingerprint for change in changes)
    counted = frozenset[int]().union(*(change.counted for change in changes))
    return Change(same, fn, keys, counted, changes[0].level)


Replacement = tuple[Callable[..., Any], list[Part]]


def _in_value(
    rule: EditRule,
    target: Target,
    given: EditOperands,
    fn: Callable[..., Any],
    parts: Sequence[Part],
) -> Replacement:
    """A change of the part of a value that a rule edits, as one of the value."""
    index = rule.index
    if index is None:
        return fn, list(parts)
    lengths = index.lengths(target.spot.own.shape)

    def in_value(x: Value, counters: Counters, *rest: Any) -> Any:
        numbers, rest = rest[: len(lengths)], rest[len(lengths) :]
        pairs = [*zip(numbers, lengths, strict=True)]
        here = index.with_numbers([jnp.where(i < 0, i + n, i) for i, n in pairs])
        out = here.put(x, fn(here.pick(x), counters, *rest))
        if not pairs:
            return out
        # JAX would take the nearest entry in the place of one that is out of range.
        inside = [(i >= -n) & (i < n) for i, n in pairs]
        return _unless(functools.reduce(jnp.logical_and, inside), out)

    return in_value, [*(Part(number) for number in given.numbers), *parts]


def _by_function(fn: Callable[..., Any], site: Site, own: Any) -> Replacement:
    def replace(x: Value) -> Any:
        out = call_on_site(fn, x, site)
        if not isinstance(out, (jax.Array, np.ndarray, np.generic, int, float, complex)):
            raise SiteError(
                f"The edit of the {site.described}, returns {type(out).__name__}, but must "
                f"return one array like the value, of type {_type(own)}."
            )
        return out

    def checked(x: Value) -> Any:
        out = jnp.asarray(replace(x))
        if out.shape != own.shape or out.dtype != own.dtype:
            raise SiteError(
                f"The edit of the {site.described}, returns {_type(out)}, but the value is "
                f"{_type(own)}. An edit keeps shape and dtype."
            )
        return _cast(out, x)

    try:
        made = jax.make_jaxpr(checked)(own)
    except NameError:  # it uses the name of an axis, which has a meaning where the site is
        return checked, []
    consts = _jax.jaxpr_consts(made)
    if not any(isinstance(c, Tracer) for c in consts):
        return checked, []

    def with_traced(x: Value, *consts: Value) -> Any:
        (out,) = eval_jaxpr(cast(Any, _jax.open_jaxpr(made)), consts, x)
        return out

    return with_traced, [Part(c) for c in consts]


def _by_array(rule: EditRule, target: Target, own: Any, array: Value) -> Replacement:
    """In the place of the value comes an array, or the part of it that is due."""
    spot, site = target.spot, target.site
    weak = not isinstance(array, jax.Array) or jax.typeof(array).weak_type
    dtype = jnp.result_type(own.dtype, array) if weak else array.dtype
    if dtype != own.dtype:
        raise SiteError(
            f"{rule} replaces the {site.described}, by an array of type {dtype}, but the "
            f"value is {_type(own)}. An edit keeps the dtype: cast the array."
        )
    if not isinstance(array, jax.Array):
        return (lambda x: jnp.full_like(x, array)), []
    if array.ndim == 0:
        return (lambda x, a: jnp.broadcast_to(_cast(a, x), x.shape)), [Part(array)]
    depths = [d for d in target.depths if rule.step is False or d != target.loop]
    sizes = [spot.around[d].size for d in depths]
    whole = (*sizes, *spot.mapped, *own.shape)
    missing = len(whole) - array.ndim
    fits = missing <= len(depths) or missing == len(depths) + len(spot.mapped)
    if missing < 0 or whole[missing:] != array.shape or not fits:
        more = f", or {list(whole)} with its loops and maps" if whole != own.shape else ""
        raise SiteError(
            f"{rule} replaces the {site.described}, by an array of shape {list(array.shape)}, "
            f"but the value has shape {list(own.shape)}{more}."
        )
    mapped = len(spot.mapped) if missing <= len(depths) else 0
    part = Part(array, tuple(depths[missing:]), mapped)
    return (lambda x, a: _cast(a, x)), [part]


def _cast(a: Value, like: Any) -> Any:
    # A weak type becomes a strong one; a random key has neither, and cannot be cast.
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    return a if is_key else jax.lax.convert_element_type(a, like.dtype)


def _due(rule: EditRule, target: Target, traced: bool) -> Callable[..., tuple[Any, Any]]:
    """Tells whether an iteration is to be edited; and whether its number is a number at all."""
    if rule.step is False:
        return lambda counters: (target.is_now(counters), None)
    if target.loop is None:
        target.spot.check_step(0, None)
    loop, length = cast(int, target.loop), target.length

    def one(counters: Counters, step: Any) -> tuple[Any, Any]:
        step = step if length is None else jnp.where(step < 0, step + length, step)
        now = target.is_now(counters) & (counters[loop] == step)
        if not traced:
            return now, None
        inside = step >= 0
        return now, inside if length is None else inside & (step < length)

    def some(counters: Counters) -> tuple[Any, Any]:
        first, last, stride = _bounds(rule, target)
        counter = counters[loop]
        now = (counter >= first) & ((counter - first) % stride == 0)
        now = now if last is None else now & (counter <= last)
        return target.is_now(counters) & now, None

    return one if rule.step is True else some


def _bounds(rule: EditRule, target: Target) -> tuple[int, int | None, int]:
    """The first and the last iteration of a slice, and how far apart they are."""
    step, length, described = rule.step, target.length, target.site.described
    assert isinstance(step, StepSlice)
    if length is None:
        if (step.start or 0) < 0 or (step.stop or 0) < 0 or (step.stride or 1) < 1:
            raise SiteError(
                f"step={step} was given for the {described}, which is in a while loop: how often "
                "that runs is not known beforehand, so `step` must count from the start."
            )
        last = None if step.stop is None else step.stop - 1
        return step.start or 0, last, step.stride or 1
    numbers = range(*step.slice.indices(length))
    if not numbers:
        raise SiteError(
            f"step={step} was given for the {described}, but that is none of the {length} "
            "iterations of its loop."
        )
    return min(numbers), max(numbers), abs(numbers.step)


def _unless(valid: Value, x: Value) -> Any:
    """Not a number, where something is not valid and numbers can be that."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return where(jnp.broadcast_to(valid, x.shape), x, jnp.full_like(x, jnp.nan))


def _type(like: Any) -> str:
    return f"{like.dtype}{list(like.shape)}"
