"""The state of a fold: its arrays, its structure, and the reducer that updates it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._jax import PyTree, Static, Value, typed
from tapax._jax.pytrees import ValueStructure, split_arrays
from tapax._jaxpr.leading_axes import align, vmapped, where
from tapax._marks.sow import has_dtype, is_array
from tapax._marks.tap import Mark
from tapax._sites import SiteError


@dataclasses.dataclass(frozen=True)
class Fold:
    """The state that a mark has folded so far: its arrays and its structure.

    `seen` says whether anything was folded. `mapped` is the number of leading batch axes of the
    arrays. Python numbers in the state are part of the structure; once a loop or a branch has
    `carried` the state, they are arrays too.
    """

    mark: Mark
    structure: ValueStructure
    arrays: tuple[Any, ...]
    seen: Any
    mapped: int
    carried: bool = False

    @property
    def state(self) -> Any:
        return self.structure.join(self.arrays)

    @property
    def bare(self) -> Fold:
        """The fold without its arrays, which must not outlive their trace."""
        return dataclasses.replace(self, arrays=(None,) * len(self.arrays), seen=self.seen is True)

    @property
    def types(self) -> Any:
        return self.structure, [(x.shape, x.dtype) for x in self.arrays]

    def over(self, axes: frozenset[str]) -> Fold:
        """Return the fold with arrays that vary over some mesh axes."""
        arrays = tuple(_jax.with_varying(x, axes) for x in self.arrays)
        return dataclasses.replace(self, arrays=arrays)


@dataclasses.dataclass(frozen=True)
class FoldMark:
    """A mark with a reducer in a body, and the types of the arrays that it folds.

    The devices along the mesh axes `uneven` may fold different numbers of values, because they
    take different branches or leave a loop at different times.
    """

    mark: Mark
    avals: tuple[Any, ...]
    mapped: int
    uneven: frozenset[str] = frozenset()

    @property
    def varying(self) -> frozenset[str]:
        """The mesh axes over which the state varies."""
        return self.uneven.union(*map(_jax.varying_axes, self.avals))

    def with_uneven(self, axes: frozenset[str]) -> FoldMark:
        return dataclasses.replace(self, uneven=self.uneven | axes)


_Folded = tuple[list[Value], Static[ValueStructure]]
"""A state: its arrays and its structure."""


def first_state(mark: Mark, *, carried: bool = False) -> Callable[..., _Folded]:
    """Make a function from the arrays of the first value to the state."""
    reduce, init = mark.reduce, mark.init
    assert reduce is not None and init is not None
    return lambda *xs: _split(reduce(init(), mark.join(xs)), carried)


def next_state(
    mark: Mark, structure: ValueStructure, *, carried: bool = False
) -> Callable[..., _Folded]:
    """Make a function from a state and the arrays of the next value to the next state."""
    reduce = mark.reduce
    assert reduce is not None

    def reduced(state: Sequence[Value], *xs: Value) -> _Folded:
        return _split(reduce(structure.join(state), mark.join(xs)), carried)

    return reduced


def _split(state: PyTree, carried: bool) -> _Folded:
    """Split a state into arrays and structure; numbers become arrays if it is `carried`."""
    arrays, structure = split_arrays(state, is_array if carried else has_dtype)
    return [typed.asarray(x) for x in arrays], Static(structure)


def fold_where(mark: Mark, fold: Fold, xs: list[Value], active: Value) -> Fold:
    """Fold a value, where it is active, into a state that may have seen nothing yet."""

    def cast(folded: _Folded, state: list[Value]) -> list[Value]:
        return _cast(mark, folded, fold.structure, state)

    def step(seen: Any, active: Value, state: list[Value], *xs: Value) -> tuple[Any, Any]:
        new = typed.cond(
            seen,
            lambda: cast(next_state(mark, fold.structure, carried=True)(state, *xs), state),
            lambda: cast(first_state(mark, carried=True)(*xs), state),
        )
        return seen | active, [where(active, a, b) for a, b in zip(new, state, strict=True)]

    flags = (
        expand_flag(f, xs, fold.mapped) for f in (fold.seen, True if active is None else active)
    )
    seen, state = vmapped(step, fold.mapped)(*flags, list(fold.arrays), *xs)
    seen = True if active is None else seen
    return dataclasses.replace(fold, arrays=tuple(state), seen=seen)


def fresh_fold(fold_mark: FoldMark) -> Fold:
    """Make a fold that has seen nothing yet, with the type that it will keep."""
    mark, mapped = fold_mark.mark, fold_mark.mapped
    arrays, structure = _types(vmapped(first_state(mark, carried=True), mapped), *fold_mark.avals)
    once = Fold(mark, structure, tuple(arrays), False, mapped, carried=True)
    reduce = vmapped(next_state(mark, structure, carried=True), mapped)
    try:
        arrays, structure = _types(reduce, arrays, *fold_mark.avals)
        twice = dataclasses.replace(once, structure=structure, arrays=tuple(arrays))
    except TypeError:
        twice = None
    if twice is None or once.types != twice.types:
        raise unstable(mark, once.types)
    zeros = (_jax.zeros(aval) for aval in once.arrays)
    return dataclasses.replace(once, arrays=tuple(zeros)).over(fold_mark.varying)


def _types(fn: Callable[..., _Folded], *avals: PyTree) -> tuple[list[Any], ValueStructure]:
    """Return the types and the structure of the state that `fn` returns for these types."""

    def made() -> _Folded:
        return fn(*jax.tree.map(_jax.zeros, avals))

    jaxpr, (_, structure) = typed.make_jaxpr(made, return_shape=True)()
    return [v.aval for v in _jax.open_jaxpr(jaxpr).outvars], structure.value


def carried_fold(fold: Fold, fold_mark: FoldMark) -> Fold:
    """Convert the numbers in a fold to arrays, so that a loop or a branch can carry it."""
    if fold.carried:
        return fold
    arrays, structure = split_arrays(fold.state, is_array)
    spread = (
        typed.asarray(x)
        if has_dtype(x)
        else _repeat(typed.asarray(x), fold_mark.avals[0], fold.mapped)
        for x in arrays
    )
    return dataclasses.replace(fold, structure=structure, arrays=tuple(spread), carried=True)


def evenly_mapped(mark: Mark, arrays: list[tuple[Value, int]]) -> tuple[list[Value], int]:
    """Give all arrays of a value the batch axes that some have; return the number of axes too."""
    x, mapped = max(arrays, key=lambda pair: pair[1])
    batch = x.shape[:mapped]
    if any(count and x.shape[:count] != batch for x, count in arrays):
        raise SiteError(
            f"The {mark.described}, is one of several arrays that are folded together, but the "
            "arrays are under different vmaps. Sow each array under a different name."
        )
    spread = (y if n == mapped else _repeat(y, jax.typeof(x), mapped) for y, n in arrays)
    return list(spread), mapped


def expand_flag(flag: Any, arrays: Sequence[Value], mapped: int) -> Any:
    """Broadcast a flag with the outermost batch axes to all `mapped` axes of `arrays`."""
    if not arrays:
        return typed.asarray(flag)
    like = jax.typeof(arrays[0])
    expanded = jnp.broadcast_to(align(flag, mapped), like.shape[:mapped])
    expanded = _jax.with_varying(expanded, _jax.varying_axes(like))
    return _jax.with_spec(expanded, tuple(like.sharding.spec)[:mapped])


def _repeat(x: Value, aval: Any, mapped: int) -> Value:
    """Repeat an unmapped value along the `mapped` leading batch axes of a type."""
    repeated = jnp.broadcast_to(x, (*aval.shape[:mapped], *x.shape))
    spec = (*tuple(aval.sharding.spec)[:mapped], *jax.typeof(x).sharding.spec)
    return _jax.with_spec(repeated, spec)


def _cast(mark: Mark, folded: _Folded, structure: ValueStructure, like: list[Value]) -> list[Value]:
    """Cast the arrays of a new state to the dtypes of the arrays `like` of the old state."""
    arrays, made = folded
    if (made.value, [x.shape for x in arrays]) != (structure, [x.shape for x in like]):
        raise unstable(mark, (structure, [(x.shape, x.dtype) for x in like]))
    return [
        _jax.with_varying(typed.asarray(x, before.dtype), _jax.varying_axes(jax.typeof(before)))
        for x, before in zip(arrays, like, strict=True)
    ]


def unstable(mark: Mark, types: Any) -> SiteError:
    """Make the error for a reducer whose result has `types` at first and others later."""
    structure, arrays = types
    shown = structure.join(f"{dtype}{list(shape)}" for shape, dtype in arrays)
    return SiteError(
        f"The reducer of the {mark.described}, is used in a loop or a branch, where its result "
        f"must keep its type, but it returns {shown} the first time and another type the second "
        "time. Make `reduce` return a state with the structure, shapes and dtypes of the state "
        "that it takes."
    )
