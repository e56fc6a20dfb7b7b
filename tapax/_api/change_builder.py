"""How the rules of an edit become the changes of a walk: at one site, for one value.

A function is traced on the type of the value, which tells whether it keeps that type, and what
traced arrays it closes over: those have to be handed down to where the site is.
"""

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr

from tapax import _jax
from tapax._calling.survey import Spot
from tapax._jax import Value
from tapax._jaxpr.leading_axes import where
from tapax._sites import Selection, SiteError, StepSlice, matches
from tapax._walk.changes import Change, Changes, Key, Part, PartKey


@dataclasses.dataclass(frozen=True)
class EditRule:
    """One edit: which sites, and by which function, or by an array if there is none.

    `step` is True if the edit is of one iteration, whose number is given; or it is a slice of them.
    """

    of: str
    selection: Selection
    fn: Callable[..., Any] | None
    step: bool | StepSlice = False

    def picks(self, spot: Spot) -> bool:
        return self.of == spot.key.of and matches(self.selection, spot.site)

    def replace(self, x: Value, site: Any) -> Any:
        assert self.fn is not None
        return self.fn(x, site) if _takes_site(self.fn) else self.fn(x)

    def __str__(self) -> str:
        argument = "values" if self.of == "value" else "grads"
        return f"{argument}={self.selection!r}"


def _takes_site(fn: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return False
    if "site" in signature.parameters:
        return True
    try:
        signature.bind(None)
    except TypeError:
        return True
    return False


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
        counted: bool = False,
    ) -> None:
        """Has the value of a site changed into `fn(x, counter, *parts)`, after other changes.

        Changes by functions that do the `same`, with the same parts, are equal.
        """
        lie = tuple((id(part.array), part.depths, part.mapped) for part in parts)
        same = fn if same is None else same, lie
        keys = []
        for part in parts:
            keys.append(PartKey(spot.key, len(self._parts)))
            self._parts[keys[-1]] = part
        change = Change(same, fn, tuple(keys), counted, spot.level)
        self._changes.setdefault(spot.key, []).append(change)
        self._sites.setdefault(spot.uid, set()).add(spot.key)

    def add(self, rule: EditRule, spot: Spot, array: Value, step: Any) -> None:
        """Has a site changed as a rule says, with the array and the number of an iteration."""
        made = _by_array(rule, spot, array) if rule.fn is None else _by_function(rule, spot)
        replace, parts = made
        same = rule, spot.site if rule.fn is not None and _takes_site(rule.fn) else None
        if rule.step is False:
            self.change(spot, lambda x, counter, *parts: replace(x, *parts), parts, same=same)
            return
        traced = isinstance(step, Tracer) and not self._checked
        due = _due(rule, spot, traced)
        given = [] if rule.step is not True else [Part(jnp.asarray(step, jnp.int32))]

        def at_step(x: Value, counter: Value, *rest: Any) -> Any:
            steps, rest = rest[: len(given)], rest[len(given) :]
            now, valid = due(counter, *steps)
            change = lambda x, *rest: _jax.like(replace(x, *rest), jax.typeof(x))  # noqa: E731
            if rule.fn is None:
                out = jnp.where(now, change(x, *rest), x)
            else:
                out = jax.lax.cond(now, change, lambda x, *rest: x, x, *rest)
            return out if valid is None else _unless(valid, out)

        self.change(spot, at_step, [*given, *parts], same=same, counted=True)


def _composed(changes: Sequence[Change]) -> Change:
    if len(changes) == 1:
        return changes[0]

    def fn(x: Value, counter: Value, *parts: Any) -> Any:
        rest = iter(parts)
        for change in changes:
            x = change.fn(x, counter, *(next(rest) for _ in change.parts))
        return x

    keys = tuple(key for change in changes for key in change.parts)
    same = tuple(change.same for change in changes)
    counted = any(change.counted for change in changes)
    return Change(same, fn, keys, counted, changes[0].level)


Replacement = tuple[Callable[..., Any], list[Part]]


def _by_function(rule: EditRule, spot: Spot) -> Replacement:
    def replace(x: Value) -> Any:
        out = rule.replace(x, spot.site)
        if not isinstance(out, (jax.Array, np.ndarray, np.generic, int, float, complex)):
            raise SiteError(
                f"The edit of the {spot.site.described}, returns {type(out).__name__}, but must "
                f"return one array like the value, of type {_type(spot.own)}."
            )
        return out

    def checked(x: Value) -> Any:
        out = jnp.asarray(replace(x))
        if out.shape != spot.own.shape or out.dtype != spot.own.dtype:
            raise SiteError(
                f"The edit of the {spot.site.described}, returns {_type(out)}, but the value is "
                f"{_type(spot.own)}. An edit keeps shape and dtype."
            )
        return _cast(out, x)

    try:
        made = jax.make_jaxpr(checked)(spot.own)
    except NameError:  # it uses the name of an axis, which has a meaning where the site is
        return checked, []
    consts = _jax.jaxpr_consts(made)
    if not any(isinstance(c, Tracer) for c in consts):
        return checked, []

    def with_traced(x: Value, *consts: Value) -> Any:
        (out,) = eval_jaxpr(cast(Any, _jax.open_jaxpr(made)), consts, x)
        return out

    return with_traced, [Part(c) for c in consts]


def _by_array(rule: EditRule, spot: Spot, array: Value) -> Replacement:
    """In the place of the value comes an array, or the part of it that is due."""
    own = spot.own
    weak = not isinstance(array, jax.Array) or jax.typeof(array).weak_type
    dtype = jnp.result_type(own.dtype, array) if weak else array.dtype
    if dtype != own.dtype:
        raise SiteError(
            f"{rule} replaces the {spot.site.described}, by an array of type {dtype}, but the "
            f"value is {_type(own)}. An edit keeps the dtype: cast the array."
        )
    if not isinstance(array, jax.Array):
        return (lambda x: jnp.full_like(x, array)), []
    if array.ndim == 0:
        return (lambda x, a: jnp.broadcast_to(_cast(a, x), x.shape)), [Part(array)]
    depths = [d for d in spot.depths if not (rule.step is not False and d == spot.loop)]
    sizes = [spot.around[d].size for d in depths]
    whole = (*sizes, *spot.mapped, *own.shape)
    missing = len(whole) - array.ndim
    fits = missing <= len(depths) or missing == len(depths) + len(spot.mapped)
    if missing < 0 or whole[missing:] != array.shape or not fits:
        more = f", or {list(whole)} with its loops and maps" if whole != own.shape else ""
        raise SiteError(
            f"{rule} replaces the {spot.site.described}, by an array of shape {list(array.shape)}, "
            f"but the value has shape {list(own.shape)}{more}."
        )
    mapped = len(spot.mapped) if missing <= len(depths) else 0
    part = Part(array, tuple(depths[missing:]), mapped)
    return (lambda x, a: _cast(a, x)), [part]


def _cast(a: Value, like: Any) -> Any:
    # A weak type becomes a strong one; a random key has neither, and cannot be cast.
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    return a if is_key else jax.lax.convert_element_type(a, like.dtype)


def _due(rule: EditRule, spot: Spot, traced: bool) -> Callable[..., tuple[Any, Any]]:
    """Tells whether an iteration is to be edited; and whether its number is a number at all."""
    if spot.loop is None:
        raise SiteError(
            f"`step` was given for the {spot.site.described}, which is in no loop. Leave it out."
        )
    length = spot.around[spot.loop].size

    def one(counter: Value, step: Any) -> tuple[Any, Any]:
        step = step if length is None else jnp.where(step < 0, step + length, step)
        if not traced:
            return counter == step, None
        inside = step >= 0
        return counter == step, inside if length is None else inside & (step < length)

    def some(counter: Value) -> tuple[Any, Any]:
        step = rule.step
        assert isinstance(step, StepSlice)
        if length is None and (
            (step.start or 0) < 0 or (step.stop or 0) < 0 or (step.stride or 1) < 1
        ):
            raise SiteError(
                f"step={step} was given for the {spot.site.described}, which is in a while loop: "
                "how often that runs is not known beforehand, so `step` must count from the start."
            )
        if length is not None:
            numbers = range(*step.slice.indices(length))
            if not numbers:
                raise SiteError(
                    f"step={step} was given for the {spot.site.described}, but that is none of the "
                    f"{length} iterations of its loop."
                )
            first, last, stride = min(numbers), max(numbers), abs(numbers.step)
        else:
            first, stride = step.start or 0, step.stride or 1
            last = None if step.stop is None else step.stop - 1
        now = (counter >= first) & ((counter - first) % stride == 0)
        return now if last is None else now & (counter <= last), None

    return one if rule.step is True else some


def check_step(spot: Spot, step: int) -> None:
    """Raises for the number of an iteration that there is not."""
    if spot.loop is None:
        return  # that is said when the change is made
    length = spot.around[spot.loop].size
    low = 0 if length is None else -length
    if step < low or (length is not None and step >= length):
        has = f"has {length} iterations" if length is not None else "counts from 0"
        raise SiteError(f"step={step} was given for the {spot.site.described}, but its loop {has}.")


def _unless(valid: Value, x: Value) -> Any:
    """Not a number, where something is not valid and numbers can be that."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return where(jnp.broadcast_to(valid, x.shape), x, jnp.full_like(x, jnp.nan))


def _type(like: Any) -> str:
    return f"{like.dtype}{list(like.shape)}"
