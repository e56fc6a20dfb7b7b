"""The marks of `compat.oryx`, and the hooks of walks that find them in a program."""

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p

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

LeafKey: TypeAlias = tuple[Hashable, Name, int]
"""The tag, the name and the number of a leaf of a sown value."""

nesting = ContextVariable[Name](())
weak_plants = ContextVariable[tuple[tuple[LeafKey, Any], ...]](())
"""The leaves whose plants have a weak type, with the dtype of the plant."""


class RulePlant:
    """A value to plant in the derivative rules of a program; `is_used` after a rule has sown it."""

    def __init__(self, value: Any):
        self.value = value
        self.is_used = False


class _RulePlants(threading.local):
    """The plants, by tag and name, for the derivative rule that this thread traces."""

    def __init__(self) -> None:
        self.value: Mapping[tuple[Hashable, Name], RulePlant] = {}

    @contextlib.contextmanager
    def __call__(self, value: Mapping[tuple[Hashable, Name], RulePlant]) -> Iterator[None]:
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


rule_plants = _RulePlants()
_SCALAR_TYPES = {"b": bool, "i": int, "u": int, "f": float, "c": complex}
_HERE = os.path.dirname(__file__)


@dataclasses.dataclass(frozen=True)
class SownLeaf:
    """A leaf of a sown value; `only` is `reap` or `plant` if it can only be reaped or planted."""

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
        """The name in a harvested function, without the scopes around the function."""
        return self.name[len(nesting.value) :]

    @property
    def path(self) -> str:
        tag = self.tag if isinstance(self.tag, str) else f"{type(self.tag).__name__}({self.tag!r})"
        path = "/".join(map(segment, (tag, *self.name)))
        # A folded leaf has a different path, even if the name is also sown in another mode.
        index = "" if jax.tree_util.treedef_is_leaf(self.treedef) else str(self.index)
        kind = "last" if self.folds else "plant" if self.only else ""
        leaf = ".".join(filter(None, (index, kind)))
        return f"{path}:{leaf}" if leaf else path


class _UnscopedMark(Mark):
    """A mark whose name does not depend on the `tapax.scope`s and modules around it."""

    def within(self, scopes: Any) -> Mark:
        return self


def mark_sow(value: PyTree, sown: SownLeaf, source: str = "") -> Any:
    check_string("name", sown.name[-1])
    hash(sown.tag)
    here = active_policy()
    if here is None:
        return value
    planted = rule_plants.value.get((sown.tag, (*nesting.value, *sown.name)))
    if planted is not None and sown.only != "reap":
        planted.is_used = True
        return planted.value
    leaves, treedef = jax.tree.flatten(value)
    # A value without leaves can be reaped, too: an array without elements represents it.
    arrays = list(map(jnp.asarray, leaves)) or [jnp.zeros((0,), bool)]
    name = (*nesting.value, *sown.name)
    fold = {"reduce": _keep_last, "init": _make_nothing} if sown.folds else {}
    for i, x in enumerate(arrays):
        leaf = dataclasses.replace(sown, name=name, index=i, treedef=treedef)
        where = leaf.path, "sow", source or find_caller()
        if sown.only != "reap":
            x = _follow_plant(x, leaf)
        arrays[i] = tap(x, _UnscopedMark(*where, collection=leaf, **here.on_marks, **fold))
    return treedef.unflatten(arrays[: len(leaves)])


def _follow_plant(x: Value, leaf: SownLeaf) -> Value:
    """Cast a value that cannot represent its plant, as an integer cannot represent a float.

    The rest of the program is then traced for the type of the plant.
    """
    dtype = dict(weak_plants.value).get((leaf.tag, leaf.name, leaf.index))
    if dtype is None or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return x if _can_hold(x.dtype, dtype) else as_weak(x, dtype)


def give_way(x: Value, dtype: Any) -> Value:
    """Cast a value of a weak type to a strong type that can represent it."""
    return x.astype(dtype) if _can_hold(dtype, x.dtype) else x


def _can_hold(dtype: Any, weak: Any) -> bool:
    """Return whether an array of type `dtype` keeps its type next to a value of a weak type."""
    return dtype == jnp.result_type(dtype, _SCALAR_TYPES.get(weak.kind, float))


def as_weak(x: Value, dtype: Any) -> Value:
    """Cast to a weak type, which adapts to other types, as a Python number does."""
    return convert_element_type_p.bind(x, new_dtype=dtype, weak_type=True, sharding=None)


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


class SowPlace(NamedTuple):
    """The frames around a sown value, outermost first, and its type."""

    frames: tuple[SowFrame, ...]
    shape: tuple[int, ...]
    dtype: Any
    is_weak: bool


class SowHooks(WalkHooks):
    """Records the frames around each call of a sow, and the number of branches of conditionals."""

    def __init__(self) -> None:
        self.placed: dict[Call, SowPlace] = {}
        self.branch_counts: dict[Any, int] = {}
        self._frames: tuple[SowFrame, ...] = ()
        self._path: tuple[int, ...] = ()

    def equation(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        before, self._path = self._path, (*self._path, id(eqn))
        if kind_of(eqn) is Kind.COND:
            self.branch_counts[self._path] = len(eqn.params["branches"])
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
            # `vmap` turns conditionals into selections, so that only the tap knows its branches.
            numbers = tap.eqn.params["branches"]
            selected = (SowFrame(Kind.COND, "vmap", numbers),) if numbers else ()
            value = tap.eqn.invars[0].aval
            frames, weak = (*self._frames, *selected), bool(getattr(value, "weak_type", False))
            self.placed[tap.call] = SowPlace(frames, value.shape, value.dtype, weak)
        super().record(walk, tap)


class SowSurveyHooks(SowHooks, SurveyHooks):
    """Records the places of the sows, and the frames around each call."""

    def __init__(self) -> None:
        SowHooks.__init__(self)
        SurveyHooks.__init__(self, frozenset())


class ReapHooks(SowHooks):
    """Records the sows that it `picks`, and removes those that it `takes`."""

    def __init__(
        self,
        picks: Fn,
        takes: Fn,
        policy: MarkingPolicy,
        plants: Mapping[tuple[Hashable, Name], RulePlant],
    ):
        super().__init__()
        self.picks, self._takes, self._policy, self._plants = picks, takes, policy, plants

    def equation(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        kind = kind_of(eqn)
        if kind is Kind.WHILE:
            self._refuse(eqn.params["cond_jaxpr"], "the predicate of a while loop")
        if kind & CUSTOM_RULES:
            known = walk.materialize(eqn.invars, args)
            if runs_rules(known):
                with rule_plants(self._plants):
                    return walk_rule(walk, eqn, known, self._policy)
        return super().equation(walk, eqn, args)

    def differentiate_edited(self, walk: Interpreter, edited: Sequence[Key]) -> None:
        """Leave the derivative to the rule, as oryx does."""

    def opaque(self, walk: Interpreter, eqn: Equation) -> None:
        self._refuse(list(eqn.params.values()), f"a call of {_jax.operation_name(eqn)!r}")

    def _refuse(self, value: PyTree, place: str) -> None:
        marks: list[Mark] = []
        strip(value, marks)
        for mark in marks:
            if self.picks(mark.collection):
                raise SiteError(
                    f"{show(mark.collection.name)}, sown at {mark.source}, cannot be reaped, "
                    f"because it is in {place}. Sow it elsewhere, or put it in the `blocklist`."
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


def show(name: Name) -> str:
    return repr("/".join(name))
