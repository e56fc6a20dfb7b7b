"""The range of units of a state that each element of every value in a program influences.

A backward pass over the equations finds the ranges, from a new state whose elements are numbered:
elementwise equations pass the numbers on, equations that move elements move the numbers, and the
range of an element that reaches several units extends from the first to the last.

There are two kinds of ranges. *Wide* ranges count all paths. *Direct* ranges count only the paths
on which each element is computed from one element, not through sums and products of matrices. In a
layer normalisation, an element reaches all units of its row, but only one of them directly.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    concatenate_p,
    dot_general_p,
    dynamic_slice_p,
    dynamic_update_slice_p,
    gather_p,
    pad_p,
    reshape_p,
    rev_p,
    slice_p,
    squeeze_p,
    stop_gradient_p,
    transpose_p,
)

from tapax import _jax
from tapax._jax import AbstractValue, Atom, Equation, Value
from tapax._jaxpr.kinds import CUSTOM_RULES, Kind, kind_of
from tapax.hidden.online._flat_step import INLINED, is_variable

_NEVER = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class UnitRange:
    """The first and the last unit that each element reaches; an empty range has low > high."""

    low: np.ndarray
    high: np.ndarray

    @staticmethod
    def empty(shape: Sequence[int]) -> UnitRange:
        return UnitRange(np.full(shape, _NEVER), np.full(shape, -1))

    @staticmethod
    def identity(shape: Sequence[int]) -> UnitRange:
        units = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
        return UnitRange(units, units)

    def __or__(self, other: UnitRange | None) -> UnitRange:
        if other is None:
            return self
        return UnitRange(np.minimum(self.low, other.low), np.maximum(self.high, other.high))

    def map(self, fn: Callable[[np.ndarray], np.ndarray]) -> UnitRange:
        return UnitRange(fn(self.low), fn(self.high))

    def where(self, other: UnitRange) -> UnitRange:
        """Take the ranges of `other` for elements that reach a unit; empty ranges for others."""
        there = self.reaches_any
        return UnitRange(np.where(there, other.low, _NEVER), np.where(there, other.high, -1))

    def merge(self, axes: Any, keepdims: bool = False) -> UnitRange:
        """Merge the ranges of all elements along some axes."""
        least = {"axis": axes, "keepdims": keepdims}
        return UnitRange(self.low.min(**least, initial=_NEVER), self.high.max(**least, initial=-1))

    @property
    def reaches_any(self) -> np.ndarray:
        return self.low <= self.high

    @property
    def is_single(self) -> np.ndarray:
        return self.low == self.high


Ranges = list[UnitRange | None]
"""The ranges of the operands of an equation; None for an operand that reaches nothing."""


@dataclasses.dataclass(frozen=True)
class RangePropagation:
    """A backward pass over equations; with `mixing`, it follows sums and products of matrices.

    `inside` the body of a call with a custom derivative it follows every equation, even without a
    derivative: a spike is a comparison.
    """

    mixing: bool
    known: Mapping[Any, Any]
    inside: bool = False

    def propagate(
        self, eqns: Sequence[Any], found: dict[Any, UnitRange], stop: frozenset[Any] = frozenset()
    ) -> dict[Any, UnitRange]:
        """Complete `found`, which contains the ranges of the results of the equations.

        It does not pass the variables in `stop`, but finds their ranges.
        """
        for eqn in reversed(eqns):
            outs = [self._get(v, found, stop) for v in eqn.outvars]
            if not any(out.reaches_any.any() for out in outs):
                continue
            for atom, reach in zip(eqn.invars, self._cross(eqn, outs), strict=True):
                if reach is not None and is_variable(atom):
                    found[atom] = reach | found.get(atom)
        return found

    def _get(self, v: Any, found: dict[Any, UnitRange], stop: frozenset[Any]) -> UnitRange:
        if v not in found or v in stop or not (self.inside or _is_differentiable(v.aval)):
            return UnitRange.empty(v.aval.shape)
        return found[v]

    def _cross(self, eqn: Equation, outs: list[UnitRange]) -> Ranges:
        kind, primitive = kind_of(eqn), eqn.primitive
        shapes = [v.aval.shape for v in eqn.invars]
        if primitive is stop_gradient_p and not self.inside:
            return [None] * len(shapes)
        if kind & Kind.COPY:
            return list(outs)
        if kind & Kind.ELEMENTWISE:
            return [_fit(outs[0], shape) for shape in shapes]
        if primitive in _MOVES:
            return _move(eqn, shapes, outs)
        moved = _MOVED.get(primitive)
        if moved and all(self._find_value(v) is not None for v in eqn.invars[moved:]):
            return self._move_numbers(eqn, shapes, outs, moved)
        inner = self._enter(eqn, shapes, outs)
        if inner is not None:
            return inner
        if not self.mixing:
            return [None] * len(shapes)
        if kind & Kind.REDUCTION:
            axes = tuple(eqn.params["axes"])
            spread = outs[0].map(lambda x: np.expand_dims(x, axes))
            return [spread.map(lambda x: np.broadcast_to(x, shapes[0]))]
        if kind & Kind.CUMULATIVE:
            whole = outs[0].merge(eqn.params["axis"], keepdims=True)
            return [whole.map(lambda x: np.broadcast_to(x, shapes[0]))]
        if primitive is dot_general_p:
            return _multiply(eqn, shapes, outs[0])
        return self._reach_everything(shapes, outs)

    def _reach_everything(self, shapes: Sequence[Any], outs: Sequence[UnitRange]) -> Ranges:
        low = min(int(out.low.min(initial=_NEVER)) for out in outs)
        high = max(int(out.high.max(initial=-1)) for out in outs)
        return [UnitRange(np.full(s, low), np.full(s, high)) for s in shapes]

    def _find_value(self, atom: Atom) -> Any:
        return self.known.get(atom) if is_variable(atom) else _jax.literal_value(atom)

    def _move_numbers(
        self, eqn: Equation, shapes: Any, outs: list[UnitRange], moved: int
    ) -> Ranges:
        """Apply an operation that moves elements to their numbers."""
        numbers = _number_elements(shapes[:moved])
        rest = [self._find_value(v) for v in eqn.invars[moved:]]
        if eqn.primitive is pad_p:
            rest = [np.int32(-1)]
        with jax.ensure_compile_time_eval():
            moving = [jnp.asarray(n, jnp.int32) for n in numbers]
            made = _jax.bind_equation(eqn, [*moving, *map(jnp.asarray, rest)])
        back = _gather([np.asarray(m) for m in made], outs, shapes[:moved])
        return [*back, *[None] * len(rest)]

    def _enter(self, eqn: Equation, shapes: Any, outs: list[UnitRange]) -> Ranges | None:
        kind = kind_of(eqn)
        if kind & INLINED:
            return self._enter_body(_jax.call_body(eqn), outs)
        if kind & CUSTOM_RULES:
            found = dataclasses.replace(self, inside=True)._enter_body(_jax.call_body(eqn), outs)
            if not self.mixing or kind is not Kind.CUSTOM_VJP:
                return found
            # An argument that only the derivative uses may reach any unit.
            rest = self._reach_everything(shapes, outs)
            floats = [_is_differentiable(v.aval) for v in eqn.invars]
            return [
                other if ok and (one is None or not one.reaches_any.any()) else one
                for one, other, ok in zip(found, rest, floats, strict=True)
            ]
        if kind is Kind.COND:
            branches = [self._enter_body(body, outs) for body in eqn.params["branches"]]
            return [None, *map(join_ranges, zip(*branches, strict=True))]
        return self._enter_scan(eqn, outs) if kind is Kind.SCAN else None

    def _enter_body(self, body: Any, outs: list[UnitRange]) -> Ranges:
        inner = _jax.open_jaxpr(body)
        found: dict[Any, UnitRange] = {}
        for v, out in zip(inner.outvars, outs, strict=True):
            if is_variable(v):
                found[v] = out | found.get(v)
        constants = dict(zip(inner.constvars, _jax.jaxpr_consts(body), strict=False))
        dataclasses.replace(self, known=constants).propagate(inner.eqns, found)
        return [found.get(v) for v in inner.invars]

    def _enter_scan(self, eqn: Equation, outs: list[UnitRange]) -> Ranges:
        """Run through bodies until the ranges of the carry no longer grow."""
        first, carried = _jax.scan_split(eqn.params)
        body = eqn.params["jaxpr"]
        ys = [out.merge(0) for out in outs[carried:]]
        carry = outs[:carried]
        for _ in range(8):
            found = self._enter_body(body, [*carry, *ys])
            more = [a | b for a, b in zip(carry, found[first : first + carried], strict=True)]
            if all(_is_same(a, b) for a, b in zip(more, carry, strict=True)):
                break
            carry = more
        else:
            # Elements may move in every iteration, so that each may reach any unit.
            if not self.mixing:
                return [None] * len(eqn.invars)
            return self._reach_everything([v.aval.shape for v in eqn.invars], outs)
        length = eqn.params["length"]
        xs = [
            None if x is None else x.map(lambda a: np.broadcast_to(a, (length, *a.shape)))
            for x in found[first + carried :]
        ]
        return [*found[:first], *carry, *xs]


def _is_differentiable(aval: AbstractValue) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.int32), jnp.inexact)


def _is_same(a: UnitRange, b: UnitRange) -> bool:
    return np.array_equal(a.low, b.low) and np.array_equal(a.high, b.high)


def join_ranges(found: Iterable[UnitRange | None]) -> UnitRange | None:
    """Join the ranges of some operands; None if all of them are None."""
    there = [reach for reach in found if reach is not None]
    return functools.reduce(operator.or_, there) if there else None


def _fit(reach: UnitRange, shape: Sequence[int]) -> UnitRange:
    """Fit the range of a result to the shape of an operand, which may be broadcast."""
    start = reach.low.ndim - len(shape)
    if reach.low.shape[start:] == tuple(shape):
        return reach.merge(tuple(range(start)))
    repeated = (i for i, size in enumerate(shape) if size != reach.low.shape[start + i])
    whole = reach.merge((*range(start), *(start + i for i in repeated)), keepdims=True)
    return whole.map(lambda x: x.reshape(shape))


def _number_elements(shapes: Sequence[Any]) -> list[np.ndarray]:
    starts = np.cumsum([0, *(math.prod(s) for s in shapes)])
    return [
        np.arange(a, b).reshape(s) for a, b, s in zip(starts[:-1], starts[1:], shapes, strict=True)
    ]


def _gather(
    moved: Sequence[np.ndarray], outs: Sequence[UnitRange], shapes: Sequence[Any]
) -> Ranges:
    """Gather the ranges of elements from the results to which their numbers were `moved`."""
    ends = np.cumsum([math.prod(s) for s in shapes])
    low, high = np.full(ends[-1], _NEVER), np.full(ends[-1], -1)
    for numbers, out in zip(moved, outs, strict=True):
        inside = (numbers >= 0) & (numbers < ends[-1])
        np.minimum.at(low, numbers[inside], out.low[inside])
        np.maximum.at(high, numbers[inside], out.high[inside])
    parts = zip(np.split(low, ends[:-1]), np.split(high, ends[:-1]), shapes, strict=True)
    return [UnitRange(a.reshape(s), b.reshape(s)) for a, b, s in parts]


def _move(eqn: Equation, shapes: Sequence[Any], outs: list[UnitRange]) -> Ranges:
    numbers = _number_elements(shapes)
    made = _MOVES[eqn.primitive](eqn, *numbers)
    return _gather(made if isinstance(made, list) else [made], outs, shapes)


def _broadcast(eqn: Equation, x: np.ndarray, *sizes: Any) -> np.ndarray:
    shape, places = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    wide = [1] * len(shape)
    for i, place in enumerate(places):
        wide[place] = x.shape[i]
    return np.broadcast_to(x.reshape(wide), shape)


def _slice(eqn: Equation, x: np.ndarray) -> np.ndarray:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * x.ndim
    return x[tuple(slice(*s) for s in zip(starts, limits, strides, strict=True))]


def _split(eqn: Equation, x: np.ndarray) -> list[np.ndarray]:
    places = np.cumsum(eqn.params["sizes"])[:-1]
    return np.split(x, places, axis=eqn.params["axis"])


def _reshape(eqn: Equation, x: np.ndarray) -> np.ndarray:
    return x.reshape(eqn.outvars[0].aval.shape)


_MOVES: dict[Primitive, Callable[..., Any]] = {
    reshape_p: _reshape,
    squeeze_p: _reshape,
    transpose_p: lambda eqn, x: x.transpose(eqn.params["permutation"]),
    rev_p: lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    concatenate_p: lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    broadcast_in_dim_p: _broadcast,
    slice_p: _slice,
    jax.lax.split_p: _split,
}
_MOVED = {pad_p: 1, gather_p: 1, dynamic_slice_p: 1, dynamic_update_slice_p: 2}
"""The number of operands that an operation moves; the others give positions, and must be known."""


def _multiply(eqn: Equation, shapes: Sequence[Any], out: UnitRange) -> Ranges:
    """Find the ranges of the operands: an element reaches the results of its row or column."""
    (contract, batch) = eqn.params["dimension_numbers"]
    free = [
        [d for d in range(len(s)) if d not in (*contract[i], *batch[i])]
        for i, s in enumerate(shapes)
    ]
    shared = len(batch[0])
    found: Ranges = []
    for i, shape in enumerate(shapes):
        start = shared + (0 if i else len(free[0]))
        left = out.merge(tuple(range(start, start + len(free[1 - i]))))
        new = tuple(range(left.low.ndim, len(shape)))
        back = tuple(np.argsort([*batch[i], *free[i], *contract[i]]))
        found.append(left.map(functools.partial(_place, new, back, shape)))
    return found


def _place(new: Value, back: Any, shape: Any, x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.expand_dims(x, new).transpose(back), shape)
