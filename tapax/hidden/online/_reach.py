"""Which units of a state each element of every value in a program has an influence on.

It is found from the equations alone, backwards from a new state whose elements are numbered: what
is computed element by element passes the numbers on, what moves elements moves the numbers, and
where several units are reached the answer is the interval from the first to the last.

There are two answers. *All* ways count for `wide`. For `direct` only those count on which every
element is computed from its own: not the ones through sums and products of matrices. Under a layer
normalisation an element reaches all units of its row, but one of them directly.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax import _jax
from tapax.hidden._connections import ELEMENTWISE
from tapax.hidden.online._program import call_of, is_variable

_NEVER = np.iinfo(np.int64).max

_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"))
_RUNNING = frozenset(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"))


@dataclasses.dataclass(frozen=True)
class Reach:
    """For every element the first and the last unit reached; none if these are in no order."""

    low: np.ndarray
    high: np.ndarray

    @staticmethod
    def none(shape: Sequence[int]) -> Reach:
        return Reach(np.full(shape, _NEVER), np.full(shape, -1))

    @staticmethod
    def own(shape: Sequence[int]) -> Reach:
        units = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
        return Reach(units, units)

    def __or__(self, other: Reach) -> Reach:
        return Reach(np.minimum(self.low, other.low), np.maximum(self.high, other.high))

    def map(self, fn: Callable[[np.ndarray], np.ndarray]) -> Reach:
        return Reach(fn(self.low), fn(self.high))

    def where(self, other: Reach) -> Reach:
        """Another one, for those elements that reach anything."""
        none = Reach.none(self.low.shape)
        return Reach(
            *(
                np.where(self.some, a, b)
                for a, b in ((other.low, none.low), (other.high, none.high))
            )
        )

    def merged(self, axes: Any, keepdims: bool = False) -> Reach:
        """One answer for all elements along some axes."""
        least = {"axis": axes, "keepdims": keepdims}
        return Reach(self.low.min(**least, initial=_NEVER), self.high.max(**least, initial=-1))

    @property
    def some(self) -> np.ndarray:
        return self.low <= self.high

    @property
    def one(self) -> np.ndarray:
        return self.low == self.high


@dataclasses.dataclass(frozen=True)
class Ways:
    """What counts as a way. In the body of a call with its own derivative every equation does, also
    where nothing could be differentiated: a spike is a comparison."""

    mixing: bool
    known: Mapping[Any, Any]
    inside: bool = False

    def back(
        self, eqns: Sequence[Any], found: dict[Any, Reach], stop: frozenset[Any] = frozenset()
    ) -> dict[Any, Reach]:
        """Completes `found`, which has the reach of what equations lead to.

        What is in `stop` is reached, but nothing on the way to it.
        """
        for eqn in reversed(eqns):
            outs = [self._of(v, found, stop) for v in eqn.outvars]
            if not any(out.some.any() for out in outs):
                continue
            for atom, reach in zip(eqn.invars, self._through(eqn, outs), strict=True):
                if reach is None or not is_variable(atom):
                    continue
                found[atom] = found[atom] | reach if atom in found else reach
        return found

    def _of(self, v: Any, found: dict[Any, Reach], stop: frozenset[Any]) -> Reach:
        if v not in found or v in stop or not (self.inside or _differentiable(v.aval)):
            return Reach.none(v.aval.shape)
        return found[v]

    def _through(self, eqn: Any, outs: list[Reach]) -> list[Reach | None]:
        kind = _jax.kind_of(eqn)
        shapes = [v.aval.shape for v in eqn.invars]
        if kind == "stop_gradient" and not self.inside:
            return [None] * len(shapes)
        if kind == "optimization_barrier":
            return list(outs)
        if kind in ELEMENTWISE:
            return [_fitted(outs[0], shape) for shape in shapes]
        if kind in _MOVES:
            return _moved(eqn, shapes, outs)
        if kind in _BOUND and all(self._value(v) is not None for v in eqn.invars[_BOUND[kind] :]):
            return self._bound(eqn, shapes, outs, _BOUND[kind])
        inner = self._inner(kind, eqn, shapes, outs)
        if inner is not None:
            return inner
        if not self.mixing:
            return [None] * len(shapes)
        if kind in _REDUCTIONS:
            axes = tuple(eqn.params["axes"])
            spread = outs[0].map(lambda x: np.expand_dims(x, axes))
            return [spread.map(lambda x: np.broadcast_to(x, shapes[0]))]
        if kind in _RUNNING:
            whole = outs[0].merged(eqn.params["axis"], keepdims=True)
            return [whole.map(lambda x: np.broadcast_to(x, shapes[0]))]
        if kind == "dot_general":
            return _product(eqn, shapes, outs[0])
        return self._everything(shapes, outs)

    def _everything(self, shapes: Sequence[Any], outs: Sequence[Reach]) -> list[Reach | None]:
        low = min(int(out.low.min(initial=_NEVER)) for out in outs)
        high = max(int(out.high.max(initial=-1)) for out in outs)
        return [Reach(np.full(s, low), np.full(s, high)) for s in shapes]

    def _value(self, atom: Any) -> Any:
        return self.known.get(atom) if is_variable(atom) else _jax.literal_value(atom)

    def _bound(self, eqn: Any, shapes: Any, outs: list[Reach], moved: int) -> list[Reach | None]:
        """An operation that moves elements, done to their numbers."""
        numbers = _numbers(shapes[:moved])
        rest = [self._value(v) for v in eqn.invars[moved:]]
        if eqn.primitive.name == "pad":
            rest = [np.int32(-1)]
        with jax.ensure_compile_time_eval():
            moving = [jnp.asarray(n, jnp.int32) for n in numbers]
            made = _jax.bind_equation(eqn, [*moving, *map(jnp.asarray, rest)])
        back = _gathered([np.asarray(m) for m in made], outs, shapes[:moved])
        return [*back, *[None] * len(rest)]

    def _inner(
        self, kind: str, eqn: Any, shapes: Any, outs: list[Reach]
    ) -> list[Reach | None] | None:
        called = call_of(eqn)
        if called is not None:
            return self._body(called, outs)
        if kind.startswith("custom_jvp_call") or kind == "CustomJVPTraced":
            return dataclasses.replace(self, inside=True)._body(_jax.call_body(eqn), outs)
        if kind.startswith("custom_vjp_call") or kind == "CustomVJPTraced":
            found = dataclasses.replace(self, inside=True)._body(_jax.call_body(eqn), outs)
            if not self.mixing:
                return found
            # An argument that only the derivative uses may do anything there.
            rest = self._everything(shapes, outs)
            floats = [_differentiable(v.aval) for v in eqn.invars]
            return [
                other if ok and (one is None or not one.some.any()) else one
                for one, other, ok in zip(found, rest, floats, strict=True)
            ]
        if kind == "cond":
            found: list[Reach | None] = [None] * (len(shapes) - 1)
            for branch in eqn.params["branches"]:
                found = [
                    _either(a, b) for a, b in zip(found, self._body(branch, outs), strict=True)
                ]
            return [None, *found]
        return self._scan(eqn, outs) if kind == "scan" else None

    def _body(self, body: Any, outs: list[Reach]) -> list[Reach | None]:
        inner = _jax.open_jaxpr(body)
        found: dict[Any, Reach] = {}
        for v, out in zip(inner.outvars, outs, strict=True):
            if is_variable(v):
                found[v] = found[v] | out if v in found else out
        constants = dict(zip(inner.constvars, _jax.jaxpr_consts(body), strict=False))
        dataclasses.replace(self, known=constants).back(inner.eqns, found)
        return [found.get(v) for v in inner.invars]

    def _scan(self, eqn: Any, outs: list[Reach]) -> list[Reach | None]:
        """Bodies are gone through until what is carried reaches no more."""
        first, carried = _jax.scan_split(eqn.params)
        body = eqn.params["jaxpr"]
        ys = [out.merged(0) for out in outs[carried:]]
        carry = outs[:carried]
        for _ in range(8):
            found = self._body(body, [*carry, *ys])
            more = [
                a if b is None else a | b
                for a, b in zip(carry, found[first : first + carried], strict=True)
            ]
            if all(_same(a, b) for a, b in zip(more, carry, strict=True)):
                break
            carry = more
        else:
            # Elements wander from one iteration to the next; each may go anywhere.
            if not self.mixing:
                return [None] * len(eqn.invars)
            return self._everything([v.aval.shape for v in eqn.invars], outs)
        length = eqn.params["length"]
        xs = [
            None if x is None else x.map(lambda a: np.broadcast_to(a, (length, *a.shape)))
            for x in found[first + carried :]
        ]
        return [*found[:first], *carry, *xs]


def _differentiable(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.int32), jnp.inexact)


def _same(a: Reach, b: Reach) -> bool:
    return np.array_equal(a.low, b.low) and np.array_equal(a.high, b.high)


def _either(a: Reach | None, b: Reach | None) -> Reach | None:
    return b if a is None else a if b is None else a | b


def _fitted(reach: Reach, shape: Sequence[int]) -> Reach:
    """The reach of an operand of the result's shape, or one that is repeated along axes."""
    start = reach.low.ndim - len(shape)
    if reach.low.shape[start:] == tuple(shape):
        return reach.merged(tuple(range(start)))
    repeated = (i for i, size in enumerate(shape) if size != reach.low.shape[start + i])
    whole = reach.merged((*range(start), *(start + i for i in repeated)), keepdims=True)
    return whole.map(lambda x: x.reshape(shape))


def _numbers(shapes: Sequence[Any]) -> list[np.ndarray]:
    starts = np.cumsum([0, *(math.prod(s) for s in shapes)])
    return [
        np.arange(a, b).reshape(s) for a, b, s in zip(starts[:-1], starts[1:], shapes, strict=True)
    ]


def _gathered(
    moved: Sequence[np.ndarray], outs: Sequence[Reach], shapes: Sequence[Any]
) -> list[Reach | None]:
    """What the elements reach whose numbers were `moved` to where they are in the results."""
    ends = np.cumsum([math.prod(s) for s in shapes])
    low, high = np.full(ends[-1], _NEVER), np.full(ends[-1], -1)
    for numbers, out in zip(moved, outs, strict=True):
        inside = (numbers >= 0) & (numbers < ends[-1])
        np.minimum.at(low, numbers[inside], out.low[inside])
        np.maximum.at(high, numbers[inside], out.high[inside])
    parts = zip(np.split(low, ends[:-1]), np.split(high, ends[:-1]), shapes, strict=True)
    return [Reach(a.reshape(s), b.reshape(s)) for a, b, s in parts]


def _moved(eqn: Any, shapes: Sequence[Any], outs: list[Reach]) -> list[Reach | None]:
    numbers = _numbers(shapes)
    made = _MOVES[eqn.primitive.name](eqn, *numbers)
    return _gathered(made if isinstance(made, list) else [made], outs, shapes)


def _broadcast(eqn: Any, x: np.ndarray, *sizes: Any) -> np.ndarray:
    shape, places = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    wide = [1] * len(shape)
    for i, place in enumerate(places):
        wide[place] = x.shape[i]
    return np.broadcast_to(x.reshape(wide), shape)


def _slice(eqn: Any, x: np.ndarray) -> np.ndarray:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * x.ndim
    return x[tuple(slice(*s) for s in zip(starts, limits, strides, strict=True))]


def _split(eqn: Any, x: np.ndarray) -> list[np.ndarray]:
    places = np.cumsum(eqn.params["sizes"])[:-1]
    return np.split(x, places, axis=eqn.params["axis"])


def _reshape(eqn: Any, x: np.ndarray) -> np.ndarray:
    return x.reshape(eqn.outvars[0].aval.shape)


_MOVES: dict[str, Callable[..., Any]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "split": _split,
}
# How many operands are moved; the others say where to, and have to be known.
_BOUND = {"pad": 1, "gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2}


def _product(eqn: Any, shapes: Sequence[Any], out: Reach) -> list[Reach | None]:
    """An element of one operand reaches what its row of the other one leads to."""
    (contract, batch) = eqn.params["dimension_numbers"]
    free = [
        [d for d in range(len(s)) if d not in (*contract[i], *batch[i])]
        for i, s in enumerate(shapes)
    ]
    shared = len(batch[0])
    found: list[Reach | None] = []
    for i, shape in enumerate(shapes):
        start = shared + (0 if i else len(free[0]))
        left = out.merged(tuple(range(start, start + len(free[1 - i]))))
        new = tuple(range(left.low.ndim, len(shape)))
        back = tuple(np.argsort([*batch[i], *free[i], *contract[i]]))
        found.append(left.map(functools.partial(_placed, new, back, shape)))
    return found


def _placed(new: Any, back: Any, shape: Any, x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.expand_dims(x, new).transpose(back), shape)
