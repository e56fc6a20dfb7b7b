"""The marks of `compat.oryx`, and the walks that find where in a program they are."""

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._calling.survey import SurveyHooks
from tapax._jax import Equation, PyTree, Value
from tapax._jaxpr.kinds import CUSTOM_RULES, Kind, kind_of
from tapax._marks.context import ContextVariable, MarkingPolicy, active_policy
from tapax._marks.marked_jaxprs import strip
from tapax._marks.tap import Mark, tap
from tapax._sites import SiteError, segment
from tapax._walk.calls import Call, Token
from tapax._walk.changes import Around, Key
from tapax._walk.interpreter import Interpreter, WalkHooks
from tapax._walk.recorder import MetTap
from tapax.compat._oryx_rules import runs_rules, walk_rule

T = TypeVar("T")
Fn: TypeAlias = Callable[..., Any]
Name: TypeAlias = tuple[str, ...]
"""The scopes around a name, and the name."""

nesting = ContextVariable[Name](())
_HERE = os.path.dirname(__file__)


@dataclasses.dataclass(frozen=True)
class SownLeaf:
    """A leaf of a sown value. `only` is set if it can only be reaped, or only be planted."""

    tag: Hashable
    name: Name
    mode: str
    only: str = ""
    index: int = 0
    treedef: Any = None

    @property
    def folds(self) -> bool:
        return "clobber" in self.mode and self.only != "plant"

    @property
    def local_name(self) -> Name:
        """The name in a harvested function: without the scopes that all of it is in."""
        return self.name[len(nesting.value) :]

    @property
    def path(self) -> str:
        tag = self.tag if isinstance(self.tag, str) else f"{type(self.tag).__name__}({self.tag!r})"
        path = "/".join(map(segment, (tag, *self.name)))
        # What is folded has a path of its own, also where the name is sown in another mode.
        index = "" if jax.tree_util.treedef_is_leaf(self.treedef) else str(self.index)
        kind = "last" if self.folds else "plant" if self.only else ""
        leaf = ".".join(filter(None, (index, kind)))
        return f"{path}:{leaf}" if leaf else path


class _UnscopedMark(Mark):
    """A mark that has the same name in every `tapax.scope` and every module."""

    def within(self, scopes: Any) -> Mark:
        return self


def mark_sow(value: PyTree, sown: SownLeaf, source: str = "") -> Any:
    check_string("name", sown.name[-1])
    hash(sown.tag)
    here = active_policy()
    if here is None:
        return value
    leaves, treedef = jax.tree.flatten(value)
    # A value without leaves is reaped all the same: an array without elements stands for it.
    arrays = list(map(jnp.asarray, leaves)) or [jnp.zeros((0,), bool)]
    name = (*nesting.value, *sown.name)
    fold = {"reduce": _keep_last, "init": _make_nothing} if sown.folds else {}
    for i, x in enumerate(arrays):
        leaf = dataclasses.replace(sown, name=name, index=i, treedef=treedef)
        where = leaf.path, "sow", source or find_caller()
        arrays[i] = tap(x, _UnscopedMark(*where, collection=leaf, **here.on_marks, **fold))
    return treedef.unflatten(arrays[: len(leaves)])


def tie(value: T, key: Value) -> T:
    return value if key is None else jax.lax.optimization_barrier((value, key))[0]


def _keep_last(before: Any, new: Value) -> Any:
    del before
    return new


def _make_nothing() -> None:
    return None


def find_caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _HERE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def check_string(argument: str, value: PyTree) -> None:
    if not isinstance(value, str):
        kind = type(value).__name__
        raise TypeError(f"`{argument}` must be a string, but is {value!r} of type {kind}.")


class SowFrame(NamedTuple):
    """A loop, a mesh or a branch around a sow; `key` tells it from others of its kind."""

    kind: Kind
    key: Any
    branch: Any = 0


class SowHooks(WalkHooks):
    """Notes the frames around each call of a sow."""

    def __init__(self) -> None:
        self.placed: dict[Call, tuple[SowFrame, ...]] = {}
        self._frames: tuple[SowFrame, ...] = ()
        self._path: tuple[int, ...] = ()

    def equation(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        before, self._path = self._path, (*self._path, id(eqn))
        try:
            return super().equation(walk, eqn, args)
        finally:
            self._path = before

    @contextlib.contextmanager
    def inside(
        self, walk: Interpreter, branch: int | None, around: Sequence[Around]
    ) -> Iterator[None]:
        before = self._frames
        if branch is not None:
            self._frames = (*before, SowFrame(Kind.COND, self._path, branch))
        elif around:
            self._frames = (*before, SowFrame(around[0].kind, self._path))
        try:
            yield
        finally:
            self._frames = before

    def record(self, walk: Interpreter, tap: MetTap) -> None:
        if not tap.grad and isinstance(tap.call.mark.collection, SownLeaf):
            # Conditionals that `vmap` made selections are to be seen no more.
            numbers = tap.eqn.params["branches"]
            selected = (SowFrame(Kind.COND, "vmap", numbers),) if numbers else ()
            self.placed[tap.call] = (*self._frames, *selected)
        super().record(walk, tap)


class SowSurveyHooks(SowHooks, SurveyHooks):
    """Notes where the sows are, and the frames around each call of one."""

    def __init__(self) -> None:
        SowHooks.__init__(self)
        SurveyHooks.__init__(self, frozenset())


class ReapHooks(SowHooks):
    """Records the sows that it `picks`, and takes out those that it `takes`."""

    def __init__(self, picks: Fn, takes: Fn, policy: MarkingPolicy):
        super().__init__()
        self.picks, self._takes, self._policy = picks, takes, policy

    def equation(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        kind = kind_of(eqn)
        if kind is Kind.WHILE:
            self._refuse(eqn.params["cond_jaxpr"], "the predicate of a while loop")
        if kind & CUSTOM_RULES:
            known = walk.materialize(eqn.invars, args)
            if runs_rules(known):
                return walk_rule(walk, eqn, known, self._policy)
        return super().equation(walk, eqn, args)

    def differentiate_edited(self, walk: Interpreter, edited: Sequence[Key]) -> None:
        """Leaves the derivative to the rule, as Oryx does."""

    def opaque(self, walk: Interpreter, eqn: Equation) -> None:
        self._refuse(list(eqn.params.values()), f"a call of {_jax.operation_name(eqn)!r}")

    def _refuse(self, value: PyTree, place: str) -> None:
        marks: list[Mark] = []
        strip(value, marks)
        for mark in marks:
            if self.picks(mark.collection):
                raise SiteError(
                    f"{show(mark.collection.name)}, sown at {mark.source}, is in {place}, which "
                    "it cannot be reaped from. Sow it elsewhere, or put it in the `blocklist`."
                )

    def tap(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        if not walk.nested or not self._takes(eqn.params["mark"].collection):
            return super().tap(walk, eqn, args)
        walk.nested = False
        try:
            outs = super().tap(walk, eqn, args)
        finally:
            walk.nested = True
        empty = jnp.zeros((0,), bool)
        return [Token(out.calls, empty) if type(out) is Token else out for out in outs]


def group_by_name(placed: Mapping[Call, Sequence[SowFrame]], what: str) -> dict[Name, list[Call]]:
    """Groups calls by their names; raises where one cannot be `what`, reaped or planted."""
    found: dict[Name, list[Call]] = {}
    for call in placed:
        found.setdefault(call.mark.collection.local_name, []).append(call)
    for name, (call, *_) in found.items():
        for scope in (name[:n] for n in range(1, len(name)) if name[:n] in found):
            raise SiteError(
                f"{show(name)}, sown at {call.mark.source}, is in a scope of the name of "
                f"{show(scope)}, sown at {found[scope][0].mark.source}. Give one another name."
            )
    for name, calls in found.items():
        _check_modes(name, {call: placed[call] for call in calls}, what)
    return found


def _check_modes(name: Name, calls: Mapping[Call, Sequence[SowFrame]], what: str) -> None:
    """Raises if the mode of a name does not allow it where it is sown."""
    first = next(iter(calls))
    mode, treedef = first.mark.collection.mode, first.mark.collection.treedef
    where = f"{show(name)} is sown at {first.mark.source}"
    for call, frames in calls.items():
        other, kinds = call.mark.collection, {frame.kind for frame in frames}
        if other.mode != mode and not ("clobber" in mode and "clobber" in other.mode):
            raise SiteError(
                f"{where} in mode {mode!r}, and at {call.mark.source} in mode {other.mode!r}. Give "
                "one of them another name."
            )
        if other.treedef != treedef:
            raise SiteError(
                f"{where} with the structure {treedef}, and at {call.mark.source} with "
                f"{other.treedef}. Give one of them another name."
            )
        in_while, in_scan = Kind.WHILE in kinds, Kind.SCAN in kinds
        if "clobber" not in mode and (in_while or (in_scan and mode == "strict")):
            loop, fix = ("while", "") if in_while else ("scan", " or 'append'")
            raise SiteError(
                f"{show(name)}, sown at {call.mark.source}, is in a {loop} loop, where it cannot "
                f"be {what} in mode {mode!r}. Sow it in mode 'clobber'{fix}."
            )
    if mode == "strict" or (mode == "append" and what == "planted"):
        for a, b in itertools.combinations(calls, 2):
            leaves = a.mark.collection.index, b.mark.collection.index
            if leaves == (0, 0) and not _is_exclusive(calls[a], calls[b]):
                raise SiteError(
                    f"{show(name)} is sown at {a.mark.source}, and again at {b.mark.source}: in "
                    f"mode {mode!r} it can be {what} but once. Give one of them another name or, "
                    "with `nest`, a scope; or sow both in another mode."
                )


def _is_exclusive(a: Sequence[SowFrame], b: Sequence[SowFrame]) -> bool:
    """Whether two places are in different branches of one conditional."""
    for one, two in zip(a, b, strict=False):
        if one != two:
            return one.kind is Kind.COND and one[:2] == two[:2]
    return False


def show(name: Name) -> str:
    return repr("/".join(name))
