"""Folds: the state of marks that reduce, threaded through the bodies of a program.

`sow(x, name, reduce=, init=)` folds every call and every iteration into one value. Inside a loop
that value is a carry, in a branch an operand and a result; it never grows with the loop.

A fold that has seen nothing yet has no value of the type that it will keep: `reduce(init(), x)` may
have a shape that `init()` has not. So it is carried as zeros with a flag, `seen`, until it is
certain that something was folded; then the flag is the constant True, and costs nothing.

Outside of loops and branches, where a body runs once, a state may be anything that a reducer makes
of it: it may grow, and have parts that are not arrays.
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
    """A fold that goes through a body; `flagged` if its `seen` goes along, as an array.

    `types` are those that its state has to keep; None in a body that runs once, which may change
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
        self._held: dict[Any, tuple[Any, dict[str, FoldMark]]] = {}
        self._arrays: list[tuple[Value, int]] = []
        self.items: dict[str, Fold] = {}

    def _put(self, fold: Fold) -> None:
        """Replaces the folds instead of changing them: leaving a body puts the old ones back."""
        self.items = {**self.items, fold.mark.value_path: fold}

    @property
    def is_waiting(self) -> bool:
        """Whether there are arrays of a value that the walk has not met all of."""
        return bool(self._arrays)

    def add(self, mark: Mark, x: Value, mapped: int, live: Value) -> None:
        """Folds a value where it is live, when the last of its arrays has come.

        The mapped axes of `x` lead.
        """
        self._arrays.append((typed.asarray(x), mapped))
        if not mark.is_last_leaf:
            return
        xs, mapped = evenly_mapped(mark, self._arrays)
        self._arrays = []
        fold = self.items.get(mark.value_path)
        if fold is None and live is None:
            state, made = vmapped(first_state(mark), mapped)(*xs)
            self._put(Fold(mark, made.value, tuple(state), True, mapped))
            return
        if fold is None:
            fold = fresh_fold(FoldMark(mark, tuple(map(jax.typeof, xs)), mapped))
        if fold.mapped != mapped:
            raise SiteError(
                f"The {mark.described}, is folded under {mapped} vmaps in one call and under "
                f"{fold.mapped} in another. Give the calls two names."
            )
        if fold.seen is True and live is None:
            reduce = next_state(mark, fold.structure, carried=fold.carried)
            state, made = vmapped(reduce, mapped)(list(fold.arrays), *xs)
            self._put(dataclasses.replace(fold, structure=made.value, arrays=tuple(state)))
            return
        self._put(fold_where(mark, fold, xs, live))

    def enter(
        self, jaxprs: Sequence[Any], scopes: Scopes, *, once: bool = False
    ) -> tuple[FoldThread, ...]:
        """The folds that bodies go on with.

        Unless a body runs `once`, its folds keep their types, so those that begin there are made.
        """
        threads: dict[str, FoldThread] = {}
        for jaxpr in jaxprs:
            for path, held in self.held(jaxpr, scopes).items():
                fold = self.items.get(path)
                if fold is None and once:
                    continue
                types = None
                if not once:
                    fresh = fresh_fold(held)
                    fold = fresh if fold is None else carried_fold(fold, held)
                    types = fresh.types
                    if fold.types != types:
                        raise SiteError(
                            f"The {held.mark.described}, is folded in a loop or a branch, where "
                            "its result must keep its type, but it has another type before. Give "
                            "the values there another name."
                        )
                    self._put(fold)
                assert fold is not None
                threads[path] = FoldThread(fold.bare, fold.seen is not True, types)
        return tuple(threads.values())

    def leave(self, threads: Sequence[FoldThread], jaxpr: Jaxpr, scopes: Scopes) -> Any:
        """The folds that come out of a body that runs once: those that begin there as well."""
        if any(thread.types is not None for thread in threads):
            return threads
        found = (self.items.get(path) for path in self.held(jaxpr, scopes))
        return tuple(FoldThread(f.bare, f.seen is not True) for f in found if f is not None)

    def arrays(self, threads: Sequence[FoldThread]) -> list[Any]:
        """The arrays of some folds."""
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
        """Puts arrays back into the folds they came from; `certain` says which have seen one."""
        flat = iter(arrays)
        for i, thread in enumerate(threads):
            state = tuple(next(flat) for _ in thread.fold.arrays)
            seen = next(flat) if thread.flagged else True
            seen = True if certain and certain[i] else seen
            self._put(dataclasses.replace(thread.fold, arrays=state, seen=seen))

    def certain(self, threads: Sequence[FoldThread]) -> tuple[bool, ...]:
        """Which folds have seen something for sure."""
        return tuple(self.items[thread.path].seen is True for thread in threads)

    def held(self, jaxpr: Jaxpr, scopes: Scopes) -> dict[str, FoldMark]:
        """The reducing marks in a body that the plan selects.

        Those of a mesh are not among them: they fold on each device, and leave it as entries.
        """
        inner = _jax.open_jaxpr(jaxpr)
        key = id(inner), scopes
        if key in self._held:
            return self._held[key][1]
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
                    held = self._hold(taps, here)
                    taps = []
                    if held is not None:
                        found.setdefault(held.mark.value_path, held)
            else:
                for body in bodies(eqn):
                    for path, held in self.held(body, here).items():
                        found.setdefault(path, held)
        self._held[key] = (inner, found)  # `inner` is kept so that its id stays its own
        return found

    def _hold(self, taps: Sequence[Equation], scopes: Scopes) -> FoldMark | None:
        """The mark of a value, whose arrays have these taps, if the plan selects it."""
        mark = taps[0].params["mark"].within(scopes)
        mapped, own = split_shape(taps[0])
        dtype = taps[0].invars[0].aval.dtype
        site = mark.site(shape=(*mapped, *own), dtype=dtype, rank=len(own))
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
