"""Folds: the states of marks with reducers, threaded through the bodies of a program.

`sow(x, name, reduce=, init=)` folds every call and every iteration into one value. Inside a loop
that value is a carry, in a branch an operand and a result; it never grows with the loop.

A fold that has seen nothing yet has no value of its final type, because `reduce(init(), x)` may
have another shape than `init()`. So a loop carries zeros and a flag, `seen`. Once a value has been
folded for certain, the flag is the constant True and costs nothing.

Outside of loops and branches, where a body runs once, a reducer may return any state: it may grow,
and have parts that are not arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from tapax import _jax
from tapax._jax import Equation, Jaxpr, Value, typed
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.leading_axes import vmapped
from tapax._jaxpr.restage import uneven_axes
from tapax._marks.scopes import Scopes, scopes_of
from tapax._marks.tap import Mark, split_shape, tap_effect, tap_p
from tapax._sites import SiteError
from tapax._walk.fold_states import (
    Fold,
    FoldMark,
    carried_fold,
    evenly_mapped,
    expand_flag,
    first_state,
    fold_where,
    fresh_fold,
    next_state,
    unstable,
)
from tapax._walk.plan import Plan


@dataclasses.dataclass(frozen=True)
class FoldThread:
    """A fold that is threaded through a body, with its flag `seen` as an array if `flagged`.

    `types` are the types that the state must keep; None in a body that runs once, which may change
    them.
    """

    fold: Any
    flagged: bool
    types: Any = None

    @property
    def path(self) -> str:
        return self.fold.mark.value_path


class Folds:
    """The folds of a walk, by path."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._marks: dict[Any, tuple[Any, dict[str, FoldMark]]] = {}
        self._arrays: list[tuple[Value, int]] = []
        self.items: dict[str, Fold] = {}

    def _put(self, fold: Fold) -> None:
        """Set a fold in a new dict: the old dict is restored when the walk leaves the body."""
        self.items = {**self.items, fold.mark.value_path: fold}

    @property
    def is_waiting(self) -> bool:
        """Return whether the walk has met some, but not all arrays of a value."""
        return bool(self._arrays)

    def add(self, mark: Mark, x: Value, mapped: int, active: Value) -> None:
        """Add an array, whose batch axes lead; after the last array of a value, fold the value.

        The value counts only where `active` is true, or everywhere if it is None.
        """
        self._arrays.append((typed.asarray(x), mapped))
        if not mark.is_last_leaf:
            return
        xs, mapped = evenly_mapped(mark, self._arrays)
        self._arrays = []
        fold = self.items.get(mark.value_path)
        if fold is None and active is None:
            state, made = vmapped(first_state(mark), mapped)(*xs)
            self._put(Fold(mark, made.value, tuple(state), True, mapped))
            return
        if fold is None:
            fold = fresh_fold(FoldMark(mark, tuple(map(jax.typeof, xs)), mapped))
        if fold.mapped != mapped:
            raise SiteError(
                f"The {mark.described}, is folded under {mapped} vmaps in one call and under "
                f"{fold.mapped} in another. Give the calls different names."
            )
        if fold.seen is True and active is None:
            reduce = next_state(mark, fold.structure, carried=fold.carried)
            state, made = vmapped(reduce, mapped)(list(fold.arrays), *xs)
            self._put(dataclasses.replace(fold, structure=made.value, arrays=tuple(state)))
            return
        self._put(fold_where(mark, fold, xs, active))

    def enter(
        self,
        jaxprs: Sequence[Any],
        scopes: Scopes,
        *,
        once: bool = False,
        uneven: frozenset[str] = frozenset(),
    ) -> tuple[FoldThread, ...]:
        """Return the folds to thread through some bodies.

        Unless the bodies run `once`, their folds must keep their types, so `enter` also creates the
        folds that begin there. The devices along the mesh axes `uneven` run the bodies unevenly.
        """
        threads: dict[str, FoldThread] = {}
        for jaxpr in jaxprs:
            for path, fold_mark in self.marks_in(jaxpr, scopes).items():
                fold = self.items.get(path)
                if fold is None and once:
                    continue
                types = None
                if not once:
                    fold_mark = fold_mark.with_uneven(uneven)
                    fresh = fresh_fold(fold_mark)
                    fold = fresh if fold is None else carried_fold(fold, fold_mark)
                    fold = fold.over(fold_mark.varying)
                    types = fresh.types
                    if fold.types != types:
                        raise SiteError(
                            f"The {fold_mark.mark.described}, is folded in a loop or a branch, "
                            "where its result must keep its type, but it has another type before. "
                            "Give the values inside another name."
                        )
                    self._put(fold)
                assert fold is not None
                threads[path] = FoldThread(fold.bare, fold.seen is not True, types)
        return tuple(threads.values())

    def leave(self, threads: Sequence[FoldThread], jaxpr: Jaxpr, scopes: Scopes) -> Any:
        """Return the folds that leave a body; if it runs once, those that begin there too."""
        if any(thread.types is not None for thread in threads):
            return threads
        found = (self.items.get(path) for path in self.marks_in(jaxpr, scopes))
        return tuple(FoldThread(f.bare, f.seen is not True) for f in found if f is not None)

    def arrays(self, threads: Sequence[FoldThread]) -> list[Any]:
        """Return the arrays of some folds."""
        arrays: list[Value] = []
        for thread in threads:
            fold = self.items[thread.path]
            if thread.types is not None and fold.types != thread.types:
                raise unstable(fold.mark, thread.types)
            arrays += fold.arrays
            if thread.flagged:
                arrays.append(expand_flag(fold.seen, fold.arrays, fold.mapped))
        return arrays

    def restore(
        self, threads: Sequence[FoldThread], arrays: Sequence[Any], certain: Sequence[bool] = ()
    ) -> None:
        """Set the arrays of folds; `certain` says which folds have seen a value for certain."""
        flat = iter(arrays)
        for i, thread in enumerate(threads):
            state = tuple(next(flat) for _ in thread.fold.arrays)
            seen = next(flat) if thread.flagged else True
            seen = True if certain and certain[i] else seen
            self._put(dataclasses.replace(thread.fold, arrays=state, seen=seen))

    def certain(self, threads: Sequence[FoldThread]) -> tuple[bool, ...]:
        """Return, for each fold, whether it has seen a value for certain."""
        return tuple(self.items[thread.path].seen is True for thread in threads)

    def marks_in(self, jaxpr: Jaxpr, scopes: Scopes) -> dict[str, FoldMark]:
        """Return the marks with reducers in a body that the plan selects.

        Marks inside a shard_map are not among them: they fold on each device and become entries.
        """
        inner = _jax.open_jaxpr(jaxpr)
        key = id(inner), scopes
        if key in self._marks:
            return self._marks[key][1]
        found: dict[str, FoldMark] = {}
        taps: list[Equation] = []
        for eqn in inner.eqns:
            if tap_effect not in eqn.effects or kind_of(eqn) is Kind.SHARD_MAP:
                continue
            here = scopes_of(eqn, scopes)
            if eqn.primitive is tap_p:
                mark = eqn.params["mark"]
                if eqn.params["kind"] != "value" or mark.reduce is None:
                    continue
                taps.append(eqn)
                if mark.is_last_leaf:
                    fold_mark = self._fold_mark(taps, here)
                    taps = []
                    if fold_mark is not None:
                        known = found.get(fold_mark.mark.value_path, fold_mark)
                        found[known.mark.value_path] = known.with_uneven(fold_mark.varying)
            else:
                uneven = uneven_axes(eqn)
                for body in bodies(eqn):
                    for path, fold_mark in self.marks_in(body, here).items():
                        known = found.get(path, fold_mark)
                        found[path] = known.with_uneven(fold_mark.varying | uneven)
        self._marks[key] = (inner, found)  # keep `inner` alive, so that no other gets its id
        return found

    def _fold_mark(self, taps: Sequence[Equation], scopes: Scopes) -> FoldMark | None:
        """Return the mark of the value whose arrays have these taps, if the plan selects it."""
        mark = taps[0].params["mark"].within(scopes)
        mapped, shape = split_shape(taps[0])
        dtype = taps[0].invars[0].aval.dtype
        site = mark.site(shape=(*mapped, *shape), dtype=dtype, rank=len(shape))
        site = dataclasses.replace(site, path=mark.value_path)
        if not self._plan.choose(site, grad=False):
            return None
        shapes = [split_shape(eqn) for eqn in taps]
        count = max(len(mapped) for mapped, _ in shapes)
        batch = next(mapped for mapped, _ in shapes if len(mapped) == count)
        avals = [
            _jax.with_axes_first(eqn.invars[0].aval, eqn.params["axes"], batch) for eqn in taps
        ]
        return FoldMark(mark, tuple(avals), count)
