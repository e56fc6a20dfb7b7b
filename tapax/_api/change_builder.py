"""The conversion of the rules of an edit to the changes of a walk, for one value of a site.

An edit function is traced on the type of the value. The trace shows whether the function keeps that
type, and which traced arrays it closes over: the walk has to pass these down to the site.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr

from tapax import _jax
from tapax._api.edit_rules import Counters, EditOperands, EditRule, Target
from tapax._calling.survey import Spot
from tapax._jax import Value
from tapax._jaxpr.leading_axes import where
from tapax._sites import Site, SiteError, StepSlice, call_on_site, takes_site
from tapax._walk.changes import Change, Changes, Key, Part, PartKey


class ChangeBuilder:
    """A builder that collects the changes of each site, and the arrays that they need."""

    def __init__(self, checked: bool = True):
        self._checked = checked
        self._changes: dict[Key, list[Change]] = {}
        self._sites: dict[int, set[Key]] = {}
        self._parts: dict[Any, Part] = {}

    def changes(self) -> Changes:
        """Compose the changes collected so far, one for each site."""
        composed = {key: _compose(made) for key, made in self._changes.items()}
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
        """Change the value `x` of a site to `fn(x, counters, *parts)`, after its other changes.

        Two changes are equal if `same` and the parts are; `same` defaults to `fn`. `counted` has
        the depths of the loops whose current iterations `counters` holds.
        """
        layouts = tuple((id(part.array), part.depths, part.mapped) for part in parts)
        same = fn if same is None else same, layouts
        keys = []
        for part in parts:
            keys.append(PartKey(spot.key, len(self._parts)))
            self._parts[keys[-1]] = part
        change = Change(same, fn, tuple(keys), frozenset(counted), spot.level)
        self._changes.setdefault(spot.key, []).append(change)
        self._sites.setdefault(spot.uid, set()).add(spot.key)

    def change_target(self, target: Target, fn: Callable[..., Any], parts: Sequence[Part]) -> None:
        """Change the values of a target to `fn(x, *parts)`."""

        def now(x: Value, counters: Counters, *parts: Any) -> Any:
            out = fn(x, *parts)
            return jnp.where(target.is_now(counters), out, x) if target.layers else out

        self.change(target.spot, now, parts, counted=dict(target.layers))

    def add(self, rule: EditRule, target: Target, given: EditOperands) -> None:
        """Change the values of a target by a rule, with the operands `given` for it."""
        edited = rule.edited_type(target)
        if rule.fn is None:
            replace, parts = _by_array(rule, target, edited, given.array)
        else:
            replace, parts = _by_function(rule.fn, target.site, edited)
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
        """Change the part `x` of a value that a rule edits to `fn(x, counters, *parts)`.

        The change takes place in the iterations that the rule selects.
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


def _compose(changes: Sequence[Change]) -> Change:
    """Compose changes of one value into a single change, in order."""
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
    """Turn a change of the part that a rule edits into a change of the whole value."""
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
        # JAX would clamp an index that is out of range to the nearest entry.
        inside = [(i >= -n) & (i < n) for i, n in pairs]
        return _unless(functools.reduce(jnp.logical_and, inside), out)

    return in_value, [*(Part(number) for number in given.numbers), *parts]


def _by_function(fn: Callable[..., Any], site: Site, marked: Any) -> Replacement:
    """Replace the value by the result of `fn`, which must have the type `marked`."""

    def replace(x: Value) -> Any:
        out = call_on_site(fn, x, site)
        if not isinstance(out, (jax.Array, np.ndarray, np.generic, int, float, complex)):
            raise SiteError(
                f"The edit of the {site.described}, returns {type(out).__name__}, but must "
                f"return one array like the value, of type {_type(marked)}."
            )
        return out

    def checked(x: Value) -> Any:
        out = jnp.asarray(replace(x))
        if out.shape != marked.shape or out.dtype != marked.dtype:
            raise SiteError(
                f"The edit of the {site.described}, returns {_type(out)}, but the value is "
                f"{_type(marked)}. An edit must keep the shape and the dtype."
            )
        return _cast(out, x)

    try:
        made = jax.make_jaxpr(checked)(marked)
    except NameError:  # the function uses an axis name, which is bound only around the site
        return checked, []
    consts = _jax.jaxpr_consts(made)
    if not any(isinstance(c, Tracer) for c in consts):
        return checked, []

    def with_traced(x: Value, *consts: Value) -> Any:
        (out,) = eval_jaxpr(cast(Any, _jax.open_jaxpr(made)), consts, x)
        return out

    return with_traced, [Part(c) for c in consts]


def _by_array(rule: EditRule, target: Target, edited: Any, array: Value) -> Replacement:
    """Replace the value by an array, or by the part of it for the current iteration."""
    spot, site = target.spot, target.site
    weak = not isinstance(array, jax.Array) or jax.typeof(array).weak_type
    dtype = jnp.result_type(edited.dtype, array) if weak else array.dtype
    if dtype != edited.dtype:
        raise SiteError(
            f"{rule} replaces the {site.described}, by an array of type {dtype}, but the "
            f"value is {_type(edited)}. An edit must keep the dtype: cast the array."
        )
    if not isinstance(array, jax.Array):
        return (lambda x: jnp.full_like(x, array)), []
    if array.ndim == 0:
        return (lambda x, a: jnp.broadcast_to(_cast(a, x), x.shape)), [Part(array)]
    depths = [d for d in target.depths if rule.step is False or d != target.loop]
    sizes = [spot.around[d].size for d in depths]
    whole = (*sizes, *spot.mapped, *edited.shape)
    missing = len(whole) - array.ndim
    fits = missing <= len(depths) or missing == len(depths) + len(spot.mapped)
    if missing < 0 or whole[missing:] != array.shape or not fits:
        more = f", or {list(whole)} with its loops and maps" if whole != edited.shape else ""
        uniform = [a.name for a in spot.around if not a.is_loop and a.size is None]
        hint = (
            f" The value is the same on all devices of the mesh axis {uniform[0]!r}, so an array "
            "that replaces it has no axis for the devices."
            if uniform
            else ""
        )
        raise SiteError(
            f"{rule} replaces the {site.described}, by an array of shape {list(array.shape)}, "
            f"but the value has shape {list(edited.shape)}{more}.{hint}"
        )
    mapped = len(spot.mapped) if missing <= len(depths) else 0
    part = Part(array, tuple(depths[missing:]), mapped)
    return (lambda x, a: _cast(a, x)), [part]


def _cast(a: Value, like: Any) -> Any:
    # The cast makes a weak type strong. A random key has no weak type, and cannot be cast.
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    return a if is_key else jax.lax.convert_element_type(a, like.dtype)


def _due(rule: EditRule, target: Target, traced: bool) -> Callable[..., tuple[Any, Any]]:
    """Make a function that tells whether an iteration is edited, and whether its number is valid.

    The second result is None if the number was checked before the program runs.
    """
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
    """Return the first and the last iteration of a slice, and its stride."""
    step, length, described = rule.step, target.length, target.site.described
    assert isinstance(step, StepSlice)
    if length is None:
        if (step.start or 0) < 0 or (step.stop or 0) < 0 or (step.stride or 1) < 1:
            raise SiteError(
                f"step={step} counts from the end for the {described}, which is in a while loop. "
                "The number of iterations is not known in advance, so count from the start."
            )
        last = None if step.stop is None else step.stop - 1
        return step.start or 0, last, step.stride or 1
    numbers = range(*step.slice.indices(length))
    if not numbers:
        raise SiteError(
            f"step={step} selects none of the {length} iterations of the loop around the "
            f"{described}. Iterations count from 0."
        )
    return min(numbers), max(numbers), abs(numbers.step)


def _unless(valid: Value, x: Value) -> Any:
    """Set `x` to NaN where `valid` is false; integers stay as they are."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return where(jnp.broadcast_to(valid, x.shape), x, jnp.full_like(x, jnp.nan))


def _type(like: Any) -> str:
    return f"{like.dtype}{list(like.shape)}"
