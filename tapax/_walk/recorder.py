"""Recording: the entries and folds that a walk makes of the taps that its plan selects."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tapax import _jax
from tapax._jax import Equation, Value, pytrees, typed
from tapax._jax.pytrees import split_arrays
from tapax._jaxpr.leading_axes import vmapped, where
from tapax._marks.closed_reducers import ClosedReducer
from tapax._marks.fingerprints import fingerprint
from tapax._marks.sow import SownValue, has_dtype, is_array, leaf_name
from tapax._marks.tap import Mark, split_shape
from tapax._sites import Site, SiteError, ValueFunction
from tapax._walk.calls import Call, Calls
from tapax._walk.changes import Around
from tapax._walk.entries import Entry
from tapax._walk.folds import Folds
from tapax._walk.plan import Plan, Reading
from tapax._walk.reductions import reduce, refusal
from tapax.reduce import Reducer
from tapax.reduce._together import see_together

_KEPT = (
    "The function, or a library that it calls, stores a jaxpr that it traced earlier. Clear that "
    "jaxpr, or make the function again, before this call."
)


class MetTap(NamedTuple):
    """A tap that a walk has met: the value or gradient of one call.

    `values` has the value or gradient, and for a paired gradient its value too. `active` is the
    condition under which it counts; None if it always counts.
    """

    eqn: Equation
    values: list[Value]
    active: Value | None
    call: Call
    grad: bool


class Recorder:
    """The entries and folds in the current body of a walk, and the sites that it has met."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.entries: list[Entry] = []
        self.folds = Folds(plan)
        self.sites: list[Site] = []
        self.refused: list[tuple[Site, Reducer, str]] = []
        self.around: tuple[Around, ...] = ()
        self._calls = Calls()
        self._reducing: dict[str, Mark] = {}

    @property
    def runs_once(self) -> bool:
        """True if no loop, branch, mesh or custom rule is around the current body."""
        return not self.around

    def _site(self, call: Call, eqn: Equation, *, grad: bool, pullback: int = 0) -> Site:
        """Make the site that predicates see, with the loops around it."""
        mapped, shape = split_shape(eqn)
        folded = call.mark.reduce is not None and not grad
        loops = [] if folded else [a for a in self.around if a.is_loop]
        lengths = [a.size for a in loops if a.size is not None]
        return call.mark.site(
            shape=(*lengths, *mapped, *shape),
            dtype=eqn.invars[0].aval.dtype,
            loops=tuple(map(str, loops)),
            rank=len(shape),
            call=0 if folded else call.number,
            pullback=pullback,
            layers=() if folded else call.layers,
        )

    def chosen(
        self, eqn: Equation, call: Call, *, grad: bool, whole: bool = False
    ) -> tuple[Site, list[Reading]]:
        """Register a site, or that of the `whole` value; return it and the readings of the plan."""
        recomputed = eqn.params["kind"] == "grad recomputed"
        number = self._calls.pullback(call, recomputed=recomputed) if grad else 0
        site = self._site(call, eqn, grad=grad, pullback=number)
        if whole:
            site = dataclasses.replace(site, path=call.mark.value_path)
        if not self.plan.sees(site, call.mark):
            return site, []
        self.sites.append(dataclasses.replace(site, kind="grad") if grad else site)
        return site, self.plan.choose(site, grad)

    def record(self, tap: MetTap) -> None:
        """Record or fold a value, or record a gradient."""
        mark, axes = tap.call.mark, tap.eqn.params["axes"]
        folded = mark.reduce is not None and not tap.grad
        # The plan decides about a folded value at the first of its arrays.
        is_part = folded and self.folds.is_waiting
        site, readings = Site(""), list[Reading]()
        if not is_part:
            site, readings = self.chosen(tap.eqn, tap.call, grad=tap.grad, whole=folded)
            if not readings:
                return
        x, *pair = (_mapped_first(x, axes) for x in tap.values)
        if not tap.grad:
            self._check_reducer(mark)
        if folded:
            self.folds.add(mark, x, len(axes), tap.active)
            return
        recomputed = tap.eqn.params["kind"] == "grad recomputed"
        for entry in self._entries(site, readings, tap.call, [x, *pair], tap.active, len(axes)):
            self.entries.append(entry._replace(grad=tap.grad, recomputed=recomputed))

    def reduce_before_use(self, x: Value, first: int) -> Any:
        """Return `x`, whose uses in a loop on a GPU wait for the reductions of the last entries.

        The compiler would otherwise keep several values of an iteration until it reduces them all.
        `first` is the index of the first of these entries.
        """
        if not any(a.is_loop for a in self.around):
            return x
        reduced = [e for e in self.entries[first:] if e.reduction is not None]
        arrays = [a for e in reduced for a in e.arrays]
        if not arrays:
            return x
        x, *arrays = _jax.together_on_gpu([x, *arrays])
        left = iter(arrays)
        self.entries[first:] = [
            e if e.reduction is None else e.with_arrays(left) for e in self.entries[first:]
        ]
        return x

    def refuse_kept(self, calls: Sequence[Call], eqn: Equation) -> None:
        """Raise if the plan edits one of some calls, whose derivative was traced before the edit.

        A library may keep a jaxpr of a derivative that it traced during another capture.
        """
        for call in calls:
            site = self._site(call, eqn, grad=False)
            if any(self.plan.choose(site, grad) for grad in (False, True)):
                raise SiteError(
                    f"The {site.described}, cannot be edited, because its derivative was traced "
                    f"during another call of tapax, and kept. {_KEPT}"
                )

    def _check_reducer(self, mark: Mark) -> None:
        """Raise if two marks of one site have different reducers.

        The reducer of a framework's mark belongs to a single call, so a site may have several.
        """
        first = self._reducing.setdefault(mark.value_path, mark)
        both = first.reduce is not None and mark.reduce is not None
        if (both and mark.collection is not None) or _reducer(first) == _reducer(mark):
            return
        raise SiteError(
            f"The site {mark.value_path!r} is sown at {first.source} and at {mark.source} with "
            "reducers that differ, so its calls cannot be folded into one. Use the same `reduce` "
            "and `init` in both, or give one of them another name."
        )

    def _entries(
        self,
        site: Site,
        readings: Sequence[Reading],
        call: Call,
        xs: list[Any],
        active: Value,
        mapped: int,
    ) -> Iterator[Entry]:
        """Make the entries of a value: itself, and the results of reducers and functions."""
        whole = [r.by for r in readings if isinstance(r.by, Reducer) and r.index is None]
        seen = see_together(whole, xs[0]) if active is None else {}
        for reading in readings:
            here, parts = _part(site, reading, xs, mapped)
            several = sum(other.path == reading.path for other in readings) > 1
            label = f":{reading.by.label}" if several and reading.by is not None else ""
            entry = Entry(
                here,
                call,
                False,
                parts[0],
                active,
                steps=reading.steps,
                layer=reading.layer,
                reading=reading,
            )
            if isinstance(reading.by, Reducer):
                example = jax.ShapeDtypeStruct(parts[0].shape[mapped:], parts[0].dtype)
                why = refusal(here, reading.by, example)
                if why is not None:
                    self.refused.append((site, reading.by, why))
                    continue
                if reading.by.paired and len(parts) == 1:
                    raise SiteError(
                        f"tapax.reduce.{reading.by} compares the gradient of the "
                        f"{here.described}, with its value, but the gradient was traced during "
                        f"another call of tapax, and kept. {_KEPT}"
                    )
                operands = parts if reading.by.paired else parts[:1]
                state = None if reading.index is not None else seen.get(reading.by)
                found, state, valid = reduce(
                    here, reading.by, label, operands, mapped, active, state, self.runs_once
                )
                yield entry._replace(value=tuple(state), valid=valid, reduction=found)
                continue
            x = parts[0]
            if reading.by is not None:
                x = vmapped(functools.partial(_applied, here, reading.by), mapped)(x)
                here = dataclasses.replace(here, path=here.path + label, rank=x.ndim - mapped)
            if active is not None:
                x = where(active, x, _jax.zeros(jax.typeof(x)))
            yield entry._replace(site=here, value=x)

    def fold_entries(self) -> list[Entry]:
        """Convert the folds to entries, one for each array of a fold."""
        entries: list[Entry] = []
        for path, fold in self.folds.items.items():
            site = next(s for s in self.sites if s.path == path)
            seen = None if fold.seen is True else fold.seen
            sown = site.collection if isinstance(site.collection, SownValue) else None
            is_leaf = is_array if sown is None else has_dtype
            keyed = [(k, x) for k, x in pytrees.leaves_with_path(fold.state) if is_leaf(x)]
            if sown is not None:
                _, structure = split_arrays(fold.state, is_leaf)
                whole = dataclasses.replace(sown, structure=structure)
                site = dataclasses.replace(site, collection=whole)
                keyed = keyed or [((), typed.zeros((0,), bool))]
            for keys, leaf in keyed:
                name = path + (f":{leaf_name(keys)}" if keys else "")
                here = dataclasses.replace(site, path=name)
                chosen = self.plan.choose(site, False)
                readings = [dataclasses.replace(r, path=name) for r in chosen] or [Reading(name)]
                call = self._calls.first(fold.mark.path)
                mapped = fold.mapped if has_dtype(leaf) else 0
                made = self._entries(here, readings, call, [typed.asarray(leaf)], seen, mapped)
                entries += [e._replace(folded=True) for e in made]
        return entries


def _part(site: Site, reading: Reading, xs: Sequence[Any], mapped: int) -> tuple[Site, list[Any]]:
    """Return the site and the arrays of a reading; the batch axes of `xs` lead."""
    if reading.layer or reading.path != site.path:
        layers = () if reading.layer else site.layers
        site = dataclasses.replace(site, path=reading.path, layers=layers)
    if reading.index is None:
        return site, list(xs)
    rank = len(reading.index.check(xs[0].shape[mapped:], site))
    pick = vmapped(reading.index.pick, mapped)
    return dataclasses.replace(site, rank=rank), [pick(x) for x in xs]


def _applied(site: Site, function: ValueFunction, x: Value) -> Any:
    """Apply a function to a value; raise if it does not return an array."""
    out = function(x, site)
    if not isinstance(out, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        raise SiteError(
            f"The function {function.label!r}, given for the {site.described}, returns "
            f"{type(out).__name__}, but must return one array, which replaces the value in the "
            "result."
        )
    return typed.asarray(out)


def _reducer(mark: Mark) -> Any:
    """Return a fingerprint of the reducer of a mark; None if the mark has no reducer."""
    closed = getattr(mark.reduce, "__self__", None)
    if isinstance(closed, ClosedReducer):
        return closed.code
    return None if mark.reduce is None else fingerprint((mark.reduce, mark.init))


def _mapped_first(x: Value, axes: tuple[int, ...]) -> Any:
    order = tuple(range(len(axes)))
    x = x if axes == order else jnp.moveaxis(x, axes, order)
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x
