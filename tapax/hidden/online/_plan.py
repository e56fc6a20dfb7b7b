"""What traces a step needs: its states in groups of units, and what drives each of those.

With the products of weights and data held fixed, the new states are functions of the old ones, of
these products, and of the other weights. Where that is unit by unit, a weight's influence on a
state is its influence on the one unit that it drives, and passes from step to step by the
derivative of that unit by itself. States that the transition connects, unit by unit, form a group:
for the cell and the output of an LSTM that derivative is a matrix of two by two for every unit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tapax._frameworks.recurrent_cells import HiddenError
from tapax.hidden.online._program import Dot, Program, is_variable
from tapax.hidden.online._reach import Reach, Ways


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A weight that drives units of a group, and how.

    `dot` is the product in which it does, None if it is used element by element. `units` says for
    each element of the product, or of the weight, which unit of the group it drives; it is None if
    the weight has an influence on many, and then all of that is kept, or, if not `traced`, only
    what it is within a step. `states` are those of the group that it reaches, now or later.
    """

    weight: int
    dot: Dot | None
    units: np.ndarray | None
    states: tuple[int, ...]
    traced: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """States of one shape that the transition connects unit by unit.

    `carries` has the pairs (new, old) of states for which there is a derivative of a unit by
    itself. `block` is the number of units in a row that may depend on each other: one if the
    transition is exactly unit by unit. `seen` are those that what is put out depends on, not
    through others of the group, and `read` those whose old values it depends on, not through new
    ones or, if the signal is that of the old ones, in any way. `readout` says that it is a read-out
    with a memory: other groups drive it, it drives none, and what is put out has it without another
    weight.
    """

    states: tuple[int, ...]
    shape: tuple[int, ...]
    block: int
    carries: frozenset[tuple[int, int]]
    sources: tuple[Source, ...]
    seen: frozenset[int]
    read: frozenset[int]
    readout: bool

    @property
    def units(self) -> int:
        return math.prod(self.shape)

    @property
    def kept(self) -> tuple[int, ...]:
        """The states whose traces are needed at the next step."""
        old = self.read | {old for _, old in self.carries}
        return tuple(k for k in self.states if k in old)


INDIRECT = ("trace", "instant", "refuse")
SIGNALS = ("new", "old")


def plan(program: Program, indirect: str, signal: str = "new") -> tuple[Group, ...]:
    """The groups of a step, with everything that drives them."""
    held = frozenset(dot.result for dot in program.dots)
    parts = _components(program, held)
    before = {g: _before(program, g, parts) for g in parts}
    made = []
    for states in parts:
        last = bool(before[states]) and not any(states in b for b in before.values())
        readout = last and _is_shown(program, states, held)
        made.append(_group(program, states, held, indirect, signal, readout))
    return tuple(made)


def _ways(program: Program, k: int, held: Iterable[Any], stop: Iterable[Any]) -> list[Any]:
    """What reaches the new state `k`, directly and in all ways."""
    found = []
    for mixing in (False, True):
        seeds: dict[Any, Reach] = {}
        if is_variable(program.news[k]):
            seeds[program.news[k]] = Reach.own(program.states[k].shape)
        ways = Ways(mixing, program.known)
        found.append(ways.back(program.body, seeds, frozenset((*held, *stop))))
    return found


def _others(program: Program, states: Iterable[int]) -> frozenset[Any]:
    """Where states that are not among these are defined; but not where one of these is, too."""
    own = {program.news[k] for k in states if is_variable(program.news[k])}
    return frozenset(
        v for v, k in program.writes.items() if k not in tuple(states) and v not in own
    )


def _components(program: Program, held: frozenset[Any]) -> list[tuple[int, ...]]:
    parent = list(range(len(program.states)))

    def root(k: int) -> int:
        while parent[k] != k:
            k = parent[k]
        return k

    drives: list[dict[Any, np.ndarray]] = []
    for k, state in enumerate(program.states):
        direct, wide = _ways(program, k, held, _others(program, [k]))
        own = Reach.own(state.shape).low
        at = [(k, v) for v, k in program.writes.items()]
        for other, v in [*enumerate(program.olds), *at]:
            if program.states[other].shape != state.shape:
                continue
            is_own = v in direct and (direct[v].one & (direct[v].low == own)).any()
            is_old = v is program.olds[other]
            mixed = is_old and v in wide and (wide[v].some & ~wide[v].one).any()
            if is_own or mixed:
                parent[root(other)] = root(k)
        driven = (*(dot.result for dot in program.dots), *program.weights)
        drives.append({v: direct[v].low for v in driven if v in direct and direct[v].one.any()})
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


def _reached(program: Program, targets: Iterable[Any], stop: Iterable[Any]) -> set[Any]:
    """The variables that some others depend on, in whatever way, not through those in `stop`."""
    stop = frozenset(stop)
    found = {v for v in targets if is_variable(v)}
    for eqn in reversed(program.body):
        if any(v in found and v not in stop for v in eqn.outvars):
            found.update(v for v in eqn.invars if is_variable(v))
    return found


def _before(program: Program, states: tuple[int, ...], parts: Any) -> list[tuple[int, ...]]:
    """The groups that drive a group within a step."""
    reached = _reached(program, [program.news[k] for k in states], _others(program, states))
    drivers = {k for v, k in program.writes.items() if v in reached}
    return [other for other in parts if other != states and drivers & set(other)]


def _group(
    program: Program,
    states: tuple[int, ...],
    held: frozenset[Any],
    indirect: str,
    signal: str,
    readout: bool,
) -> Group:
    others = _others(program, states)
    shape = program.states[states[0]].shape
    own = Reach.own(shape)
    ways = {k: _ways(program, k, held, others) for k in states}
    carries, wides = set(), []
    for k in states:
        for old in states:
            wide = ways[k][1].get(program.olds[old])
            if wide is not None and wide.some.any():
                carries.add((k, old))
                wides.append(wide | wide.where(own))
    beside = _reached(program, program.outs, program.writes if signal == "new" else ())
    sources = []
    for i, dot in _uses(program, states, others):
        v = program.weights[i] if dot is None else dot.result
        direct, wide = (_joined(ways[k][way].get(v) for k in states) for way in (0, 1))
        if direct is not None and wide is not None and np.all(direct.one | ~wide.some):
            now = {k for k in states if v in ways[k][1] and ways[k][1][v].some.any()}
            units = np.where(direct.one, direct.low, 0)
            sources.append(Source(i, dot, units, _later(states, now, carries)))
            wides.append(wide)
            continue
        if indirect == "refuse":
            reached = ", ".join(program.states[k].name for k in states)
            raise HiddenError(
                f"The parameter {program.names[program.weights[i]]} of {program.name} does not "
                f"drive single units of the hidden state {reached} but many, so its trace would "
                f"have {math.prod(program.weights[i].aval.shape)} times the size of the state, and "
                "`indirect` is 'refuse'. Give 'trace' to keep it, or 'instant' to learn from what "
                "it does within a step alone."
            )
        sources.append(Source(i, dot, None, states, indirect == "trace"))
    return Group(
        states,
        shape,
        _block(shape, wides),
        frozenset(carries),
        tuple(sources),
        _seen(program, states),
        frozenset(k for k in states if program.olds[k] in beside),
        readout,
    )


def _uses(
    program: Program, states: tuple[int, ...], others: frozenset[Any]
) -> Iterator[tuple[int, Dot | None]]:
    """The weights that a group depends on: in a product, or (None) in other equations."""
    news = [program.news[k] for k in states]
    reached = _reached(program, news, others) - others
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


def _joined(found: Iterable[Reach | None]) -> Reach | None:
    there = [reach for reach in found if reach is not None]
    return functools.reduce(operator.or_, there) if there else None


def _later(
    states: tuple[int, ...], reached: set[int], carries: set[tuple[int, int]]
) -> tuple[int, ...]:
    """The states that are reached now, or from those at later steps."""
    for _ in states:
        reached = reached | {new for new, old in carries if old in reached}
    return tuple(k for k in states if k in reached)


def _block(shape: tuple[int, ...], wides: Iterable[Reach]) -> int:
    """The smallest number of last axes' units within which all influence stays."""
    sizes = [math.prod(shape[i:]) for i in range(len(shape), -1, -1)]
    inside = lambda b, w: np.all((w.low // b == w.high // b) | ~w.some)  # noqa: E731
    wides = list(wides)
    return next((b for b in sizes if b and all(inside(b, w) for w in wides)), sizes[-1])


def _is_shown(program: Program, states: tuple[int, ...], held: frozenset[Any]) -> bool:
    own = [v for v, k in program.writes.items() if k in states]
    reached = _reached(program, program.outs, held - frozenset(own))
    return any(v in reached for v in own)


def _seen(program: Program, states: tuple[int, ...]) -> frozenset[int]:
    own = frozenset(v for v, k in program.writes.items() if k in states)
    reached = _reached(program, program.outs, own)
    return frozenset(program.writes[v] for v in own if v in reached)
