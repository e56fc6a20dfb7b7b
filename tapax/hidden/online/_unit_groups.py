"""The traces that a step needs: its states in groups of units, and the weights that drive them.

With the products of weights and data held fixed, the new states are functions of the old ones, of
these products, and of the other weights. If these functions act unit by unit, a weight influences
only the unit that it drives, and its influence decays from step to step with the derivative of that
unit with respect to itself. States that the transition connects, unit by unit, form a group: for
the cell and the output of an LSTM, that derivative is a matrix of two by two for every unit.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tapax._frameworks.recurrent_cells import HiddenError
from tapax.hidden.online._flat_step import FlatStep, WeightProduct, is_variable
from tapax.hidden.online._unit_ranges import RangePropagation, UnitRange, join_ranges


@dataclasses.dataclass(frozen=True, eq=False)
class DrivingWeight:
    """A weight that drives units of a group.

    `dot` is the product of the weight with data; None for a weight used element by element. `units`
    has, for each element of the product or of the weight, the unit of the group that the element
    drives. It is None if the weight drives many units: then a trace keeps its influence on all of
    them, or, if not `traced`, only the influence within a step counts. `states` are the states of
    the group that the weight reaches, in this step or later.
    """

    weight: int
    dot: WeightProduct | None
    units: np.ndarray | None
    states: tuple[int, ...]
    traced: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class UnitGroup:
    """States of one shape that the transition connects unit by unit.

    `carries` contains the pairs (new, old) of states for which a unit has a derivative with respect
    to itself. `block` is the number of consecutive units that may depend on each other: one if the
    transition is exactly unit by unit. The output depends on the states in `seen` directly, not
    through others of the group. It depends on the old values of the states in `read`, bypassing new
    states or, if the signal is that of the old states, in any way. A group is a `readout` if it is
    a read-out with a memory: other groups drive it, it drives none, and no weight separates it from
    the output.
    """

    states: tuple[int, ...]
    shape: tuple[int, ...]
    block: int
    carries: frozenset[tuple[int, int]]
    sources: tuple[DrivingWeight, ...]
    seen: frozenset[int]
    read: frozenset[int]
    readout: bool

    @property
    def units(self) -> int:
        return math.prod(self.shape)

    @property
    def kept(self) -> tuple[int, ...]:
        """The states whose traces the next step needs."""
        old = self.read | {old for _, old in self.carries}
        return tuple(k for k in self.states if k in old)


INDIRECT = ("trace", "instant", "refuse")
SIGNALS = ("new", "old")


def find_unit_groups(
    program: FlatStep, indirect: str, signal: str = "new"
) -> tuple[UnitGroup, ...]:
    """Find the groups of a step, with the weights that drive them."""
    fixed = frozenset(dot.result for dot in program.dots)
    parts = _connect_states(program, fixed)
    before = {g: _list_drivers(program, g, parts) for g in parts}
    made = []
    for states in parts:
        last = bool(before[states]) and not any(states in b for b in before.values())
        readout = last and _is_shown(program, states, fixed)
        made.append(_make_group(program, states, fixed, indirect, signal, readout))
    return tuple(made)


def _find_ranges(program: FlatStep, k: int, fixed: Iterable[Any], stop: Iterable[Any]) -> list[Any]:
    """Find the ranges of the values that reach the new state `k`, directly and in all ways."""
    found = []
    for mixing in (False, True):
        seeds: dict[Any, UnitRange] = {}
        if is_variable(program.news[k]):
            seeds[program.news[k]] = UnitRange.identity(program.states[k].shape)
        ways = RangePropagation(mixing, program.known)
        found.append(ways.propagate(program.body, seeds, frozenset((*fixed, *stop))))
    return found


def _list_other_writes(program: FlatStep, states: Iterable[int]) -> frozenset[Any]:
    """List the definitions that define no state in `states`."""
    news = {program.news[k] for k in states if is_variable(program.news[k])}
    return frozenset(
        v for v, k in program.writes.items() if k not in tuple(states) and v not in news
    )


def _connect_states(program: FlatStep, fixed: frozenset[Any]) -> list[tuple[int, ...]]:
    parent = list(range(len(program.states)))

    def root(k: int) -> int:
        while parent[k] != k:
            k = parent[k]
        return k

    drives: list[dict[Any, np.ndarray]] = []
    for k, state in enumerate(program.states):
        direct, wide = _find_ranges(program, k, fixed, _list_other_writes(program, [k]))
        units = UnitRange.identity(state.shape).low
        at = [(k, v) for v, k in program.writes.items()]
        for other, v in [*enumerate(program.olds), *at]:
            if program.states[other].shape != state.shape:
                continue
            is_self = v in direct and (direct[v].is_single & (direct[v].low == units)).any()
            is_old = v is program.olds[other]
            mixed = is_old and v in wide and (wide[v].reaches_any & ~wide[v].is_single).any()
            if is_self or mixed:
                parent[root(other)] = root(k)
        driven = (*(dot.result for dot in program.dots), *program.weights)
        drives.append(
            {v: direct[v].low for v in driven if v in direct and direct[v].is_single.any()}
        )
        for other in range(k):
            if program.states[other].shape == state.shape and any(
                v in drives[other] and np.array_equal(units, drives[other][v])
                for v, units in drives[k].items()
            ):
                parent[root(other)] = root(k)
    parts: dict[int, list[int]] = {}
    for k in range(len(parent)):
        parts.setdefault(root(k), []).append(k)
    return [tuple(states) for states in parts.values()]


def _find_reached(program: FlatStep, targets: Iterable[Any], stop: Iterable[Any]) -> set[Any]:
    """Find the variables on which `targets` depend, except through those in `stop`."""
    stop = frozenset(stop)
    found = {v for v in targets if is_variable(v)}
    for eqn in reversed(program.body):
        if any(v in found and v not in stop for v in eqn.outvars):
            found.update(v for v in eqn.invars if is_variable(v))
    return found


def _list_drivers(program: FlatStep, states: tuple[int, ...], parts: Any) -> list[tuple[int, ...]]:
    """List the groups that drive the group of `states` within a step."""
    reached = _find_reached(
        program, [program.news[k] for k in states], _list_other_writes(program, states)
    )
    drivers = {k for v, k in program.writes.items() if v in reached}
    return [other for other in parts if other != states and drivers & set(other)]


def _make_group(
    program: FlatStep,
    states: tuple[int, ...],
    fixed: frozenset[Any],
    indirect: str,
    signal: str,
    readout: bool,
) -> UnitGroup:
    others = _list_other_writes(program, states)
    shape = program.states[states[0]].shape
    identity = UnitRange.identity(shape)
    ways = {k: _find_ranges(program, k, fixed, others) for k in states}
    carries, wides = set(), []
    for k in states:
        for old in states:
            wide = ways[k][1].get(program.olds[old])
            if wide is not None and wide.reaches_any.any():
                carries.add((k, old))
                wides.append(wide | wide.where(identity))
    beside = _find_reached(program, program.outs, program.writes if signal == "new" else ())
    sources = []
    for i, dot in _list_uses(program, states, others):
        v = program.weights[i] if dot is None else dot.result
        direct, wide = (join_ranges(ways[k][way].get(v) for k in states) for way in (0, 1))
        if direct is not None and wide is not None and np.all(direct.is_single | ~wide.reaches_any):
            now = {k for k in states if v in ways[k][1] and ways[k][1][v].reaches_any.any()}
            units = np.where(direct.is_single, direct.low, 0)
            sources.append(DrivingWeight(i, dot, units, _list_later(states, now, carries)))
            wides.append(wide)
            continue
        if indirect == "refuse":
            reached = ", ".join(program.states[k].name for k in states)
            raise HiddenError(
                f"The parameter {program.names[program.weights[i]]} of {program.name} drives many "
                f"units of the hidden state {reached}, so its trace would have "
                f"{math.prod(program.weights[i].aval.shape)} times the size of the state, and "
                "`indirect` is 'refuse'. Pass 'trace' to keep the trace, or 'instant' to learn "
                "only from the influence within a step."
            )
        sources.append(DrivingWeight(i, dot, None, states, indirect == "trace"))
    return UnitGroup(
        states,
        shape,
        _find_block(shape, wides),
        frozenset(carries),
        tuple(sources),
        _list_seen(program, states),
        frozenset(k for k in states if program.olds[k] in beside),
        readout,
    )


def _list_uses(
    program: FlatStep, states: tuple[int, ...], others: frozenset[Any]
) -> Iterator[tuple[int, WeightProduct | None]]:
    """List the weights of a group, each with its product, or None in other equations."""
    news = [program.news[k] for k in states]
    reached = _find_reached(program, news, others) - others
    at = {dot.at: dot for dot in program.dots}
    for i, weight in enumerate(program.weights):
        otherwise = any(weight is v for v in news)
        for n, eqn in enumerate(program.body):
            if any(v is weight for v in eqn.invars) and any(v in reached for v in eqn.outvars):
                if n in at:
                    yield i, at[n]
                else:
                    otherwise = True
        if otherwise:
            yield i, None


def _list_later(
    states: tuple[int, ...], reached: set[int], carries: set[tuple[int, int]]
) -> tuple[int, ...]:
    """List the states that are reached now or, through `carries`, at later steps."""
    for _ in states:
        reached = reached | {new for new, old in carries if old in reached}
    return tuple(k for k in states if k in reached)


def _find_block(shape: tuple[int, ...], wides: Iterable[UnitRange]) -> int:
    """Find the smallest block of units, of the last axes, that no influence leaves."""
    sizes = [math.prod(shape[i:]) for i in range(len(shape), -1, -1)]
    inside = lambda b, w: np.all((w.low // b == w.high // b) | ~w.reaches_any)  # noqa: E731
    wides = list(wides)
    return next((b for b in sizes if b and all(inside(b, w) for w in wides)), sizes[-1])


def _is_shown(program: FlatStep, states: tuple[int, ...], fixed: frozenset[Any]) -> bool:
    written = [v for v, k in program.writes.items() if k in states]
    reached = _find_reached(program, program.outs, fixed - frozenset(written))
    return any(v in reached for v in written)


def _list_seen(program: FlatStep, states: tuple[int, ...]) -> frozenset[int]:
    written = frozenset(v for v, k in program.writes.items() if k in states)
    reached = _find_reached(program, program.outs, written)
    return frozenset(program.writes[v] for v in written if v in reached)
