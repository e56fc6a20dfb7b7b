"""Folds: the state of marks that reduce, threaded through the bodies of a program.

`sow(x, name, reduce=, init=)` folds every call and every iteration into one value. Inside a loop
that value is a carry, in a branch an operand and a result; it never grows with the loop.

A fold that has seen nothing yet has no value of the type that it will keep: `reduce(init(), x)` may
have a shape that `init()` has not. So it is carried as zeros with a flag, `seen`, until it is
certain that something was folded; then the flag is the constant True, and costs nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._jax import AbstractValue, Equation, Jaxpr, PyTree, Value, map_leaves, pytrees, typed
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.leading_axes import align, vmapped
from tapax._marks.scopes import Scopes, scopes_of
from tapax._marks.tap import Mark, split_shape, tap_effect, tap_p
from tapax._sites import SiteError
from tapax._walk.plan import Plan


@dataclasses.dataclass(frozen=True)
class Fold:
    """What a mark has folded so far. `mapped` is how many mapped axes lead its state."""

    mark: Mark
    state: Any
    seen: Any
    mapped: int


@dataclasses.dataclass(frozen=True)
class FoldThread:
    """A fold that goes through a body; `flagged` if its `seen` goes along, as an array."""

    path: str
    flagged: bool


@dataclasses.dataclass(frozen=True)
class _FoldMark:
    """A reducing mark in a body, with the type of what it folds."""

    mark: Mark
    aval: Any
    mapped: int


class Folds:
    """The folds of a walk, by path."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._held: dict[Any, tuple[Any, dict[str, _FoldMark]]] = {}
        self.items: dict[str, Fold] = {}

    def _put(self, fold: Fold) -> None:
        """Replaces the folds instead of changing them: leaving a body puts the old ones back."""
        self.items = {**self.items, fold.mark.path: fold}

    def add(self, mark: Mark, x: Value, mapped: int, live: Value) -> None:
        """Folds `x`, whose mapped axes lead, where it is live."""
        fold = self.items.get(mark.path)
        reduce, first = _functions(mark)
        if fold is None and live is None:
            state = vmapped(first, mapped)(x)
            self._put(Fold(mark, state, True, mapped))
            return
        if fold is None:
            fold = _fresh(mark, jax.typeof(x), mapped)
        if fold.mapped != mapped:
            raise SiteError(
                f"The {mark.described}, is folded under {mapped} vmaps in one call and under "
                f"{fold.mapped} in another. Give the calls two names."
            )
        if fold.seen is True and live is None:
            state = vmapped(reduce, mapped)(fold.state, x)
            self._put(dataclasses.replace(fold, state=state))
            return

        def step(seen: Any, live: Value, state: PyTree, x: Value) -> tuple[Any, Any]:
            new = typed.cond(
                seen, lambda: _cast(reduce(state, x), state), lambda: _cast(first(x), state)
            )
            return seen | live, map_leaves(lambda a, b: jnp.where(live, a, b), new, state)

        batch = x.shape[:mapped]
        flags = (_expand(flag, batch) for flag in (fold.seen, True if live is None else live))
        seen, state = vmapped(step, mapped)(*flags, fold.state, x)
        seen = True if live is None else seen
        self._put(dataclasses.replace(fold, state=state, seen=seen))

    def enter(self, jaxprs: Sequence[Any], scopes: Scopes) -> tuple[FoldThread, ...]:
        """The folds that bodies go on with; those that begin there are made, with their types."""
        threads: dict[str, FoldThread] = {}
        for jaxpr in jaxprs:
            for path, held in self.held(jaxpr, scopes).items():
                fresh = _fresh(held.mark, held.aval, held.mapped)
                fold = self.items.get(path, fresh)
                fold = dataclasses.replace(fold, state=map_leaves(typed.asarray, fold.state))
                if _types(fold.state) != _types(fresh.state):
                    raise SiteError(
                        f"The {held.mark.described}, is folded in a loop or a branch, where its "
                        "result must keep its type, but it has another type before. Give the "
                        "values there another name."
                    )
                self._put(fold)
                threads[path] = FoldThread(path, fold.seen is not True)
        return tuple(threads.values())

    def arrays(self, threads: Sequence[FoldThread]) -> list[Any]:
        """The arrays of some folds."""
        arrays: list[Value] = []
        for thread in threads:
            fold = self.items[thread.path]
            leaves = jax.tree.leaves(fold.state)
            arrays += leaves
            if thread.flagged:
                arrays.append(_expand(fold.seen, leaves[0].shape[: fold.mapped]))
        return arrays

    def restore(
        self, threads: Sequence[FoldThread], arrays: Sequence[Any], certain: Sequence[bool] = ()
    ) -> None:
        """Puts arrays back into the folds they came from; `certain` says which have seen one."""
        flat = iter(arrays)
        for i, thread in enumerate(threads):
            fold = self.items[thread.path]
            state = map_leaves(lambda _: next(flat), fold.state)
            seen = next(flat) if thread.flagged else True
            seen = True if certain and certain[i] else seen
            self._put(dataclasses.replace(fold, state=state, seen=seen))

    def certain(self, threads: Sequence[FoldThread]) -> tuple[bool, ...]:
        """Which folds have seen something for sure."""
        return tuple(self.items[thread.path].seen is True for thread in threads)

    def held(self, jaxpr: Jaxpr, scopes: Scopes) -> dict[str, _FoldMark]:
        """The reducing marks in a body that the plan selects.

        Those of a mesh are not among them: they fold on each device, and leave it as entries.
        """
        inner = _jax.open_jaxpr(jaxpr)
        key = id(inner), scopes
        if key in self._held:
            return self._held[key][1]
        found: dict[str, _FoldMark] = {}
        for eqn in inner.eqns:
            if tap_effect not in eqn.effects or kind_of(eqn) is Kind.SHARD_MAP:
                continue
            here = scopes_of(eqn, scopes)
            if eqn.primitive is tap_p:
                held = self._hold(eqn, here)
                if held is not None:
                    found.setdefault(held.mark.path, held)
            else:
                for body in bodies(eqn):
                    for path, held in self.held(body, here).items():
                        found.setdefault(path, held)
        self._held[key] = (inner, found)  # `inner` is kept so that its id stays its own
        return found

    def _hold(self, eqn: Equation, scopes: Scopes) -> _FoldMark | None:
        mark = eqn.params["mark"].within(scopes)
        if eqn.params["kind"] != "value" or mark.reduce is None:
            return None
        if not self._plan.choose(mark.site(), grad=False):
            return None
        mapped, own = split_shape(eqn)
        aval = _jax.with_shape(eqn.invars[0].aval, (*mapped, *own))
        return _FoldMark(mark, aval, len(mapped))


def same_fold(a: Mark, b: Mark) -> bool:
    """Whether two marks fold alike."""
    return _same_function(a.reduce, b.reduce) and _same_function(a.init, b.init)


def _same_function(f: Any, g: Any) -> bool:
    """Whether two functions do the same: a lambda is a new object each time it is evaluated."""
    if f is g:
        return True
    if not (hasattr(f, "__code__") and hasattr(g, "__code__")):
        return f is not None and g is not None and f == g
    cells = [[c.cell_contents for c in h.__closure__ or ()] for h in (f, g)]
    return (
        _same_code(f.__code__, g.__code__)
        and f.__defaults__ == g.__defaults__
        and len(cells[0]) == len(cells[1])
        and all(x is y for x, y in zip(*cells, strict=True))
    )


def _same_code(a: Value, b: Value) -> bool:
    """Whether two code objects say the same, wherever they stand in the source."""
    if not (hasattr(a, "co_code") and hasattr(b, "co_code")):
        return type(a) is type(b) and a == b
    return (
        a.co_code == b.co_code
        and a.co_names == b.co_names
        and len(a.co_consts) == len(b.co_consts)
        and all(map(_same_code, a.co_consts, b.co_consts))
    )


def _functions(mark: Mark) -> tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]:
    reduce, init = mark.reduce, mark.init
    assert reduce is not None and init is not None
    return reduce, lambda x: reduce(init(), x)


def _fresh(mark: Mark, aval: AbstractValue, mapped: int) -> Fold:
    """A fold that has seen nothing yet, with the type that it will keep."""
    reduce, first = _functions(mark)
    x = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    once = typed.eval_shape(vmapped(first, mapped), x)
    try:
        stable = _types(once) == _types(typed.eval_shape(vmapped(reduce, mapped), once, x))
    except TypeError:
        stable = False
    if not stable:
        shown = map_leaves(lambda s: f"{s.dtype}{list(s.shape)}", once)
        raise SiteError(
            f"The reducer of the {mark.described}, is used in a loop or a branch, where its result "
            f"must keep its type, but it gives {shown} the first time and something else the "
            "second. Make `reduce` return what it takes."
        )
    varying = _jax.varying_axes(aval)

    def zeros(s: Any) -> Any:
        return _jax.with_varying(typed.zeros(s.shape, s.dtype), varying)

    return Fold(mark, map_leaves(zeros, once), False, mapped)


def _expand(flag: Any, batch: tuple[int, ...]) -> Any:
    """A flag with some of the mapped axes, the outermost, made to have them all."""
    return jnp.broadcast_to(align(flag, len(batch)), batch)


def _types(tree: PyTree) -> Any:
    leaves, treedef = pytrees.flatten(tree)
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _cast(tree: PyTree, like: Any) -> Any:
    return map_leaves(lambda x, s: typed.asarray(x, s.dtype), tree, like)
