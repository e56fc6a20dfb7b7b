"""Writes of hidden states, in a step and in a program that writes its states in place.

A step writes each of its hidden states once. A module whose states are objects may write a state
several times in a step: then each write is a definition, `h` and `h@1`. Two states that are written
with the same value have a definition each, and a state that is written in a body that runs many
times is defined as a result of that body.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from tapax import _jax
from tapax._frameworks.recurrent_cells import (
    StatefulProgram,
    StateObject,
    StatePath,
    find_written_name,
)
from tapax._jax import Atom, Jaxpr
from tapax._jaxpr.evaluate import inline
from tapax._jaxpr.kinds import Kind, kind_of
from tapax.hidden._definitions import Definitions, evaluate_defined, find_definitions, is_copy
from tapax.hidden._step import Step


@dataclasses.dataclass(frozen=True)
class StateWrite:
    """A write of a hidden state: its name, the path and the object of the state, and its type."""

    name: str
    path: StatePath
    state: Any
    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class WrittenProgram:
    """A program, its writes in the order of its states, and where it defines the written values."""

    jaxpr: Any
    writes: tuple[StateWrite, ...]
    definitions: Definitions


def find_step_writes(step: Step) -> WrittenProgram:
    """Find the writes of a traced step: one for each hidden state."""
    writes = tuple(StateWrite(s.name, s.path, s, s.shape, s.dtype) for s in step.states)
    return WrittenProgram(step.jaxpr, writes, step.find_definitions())


def find_named_writes(program: StatefulProgram, *, last_only: bool = False) -> WrittenProgram:
    """Find the writes that equations name, and the states that a program returns without a write.

    With `last_only`, it finds only the last write of each state.
    """
    jaxpr = program.jaxpr
    if _has_names_in_jit(jaxpr):
        jaxpr = inline(jaxpr, Kind.JIT)
    inner = _jax.open_jaxpr(jaxpr)
    made = {v: eqn for eqn in inner.eqns for v in eqn.outvars}
    hidden = {s.name: s for s in program.states if s.hidden_type is not None}
    writes: list[StateWrite] = []
    counts: Counter[str] = Counter()

    def add(state: StateObject) -> str:
        number = counts[state.name]
        counts[state.name] += 1
        key = f"{state.name}@{number}" if number else state.name
        like = state.hidden_type
        assert like is not None
        writes.append(StateWrite(key, state.path, state.object, like.shape, like.dtype))
        return key

    named: list[tuple[Any, str]] = []
    for eqn in inner.eqns:
        name = find_written_name(eqn)
        # A transform of the framework writes its results a second time, with the same value.
        if name is not None and name not in _find_names(made, eqn.invars[0]):
            named.append((eqn.outvars[0], name))
    index = len(inner.outvars) - sum(s.num_leaves for s in program.states)
    returned: dict[int, StateObject] = {}
    for state in program.states:
        if state.name in hidden and state.name not in _find_names(made, inner.outvars[index]):
            returned[index] = state
        index += state.num_leaves
    if last_only:
        later = {state.name for state in returned.values()}
        last = {name: variable for variable, name in named if name not in later}
        named = [(variable, name) for name, variable in last.items()]
    copies = {variable: add(hidden[name]) for variable, name in named}
    results = {index: add(state) for index, state in returned.items()}
    order = {s.path: i for i, s in enumerate(program.states)}
    writes.sort(key=lambda write: order[write.path])
    return WrittenProgram(jaxpr, tuple(writes), find_definitions(jaxpr, results, copies))


def _find_names(made: Any, atom: Atom) -> set[str | None]:
    """Find the names under which a value is written, through copies."""
    names = set()
    while not isinstance(atom, _jax.Literal) and atom in made and is_copy(made[atom]):
        names.add(find_written_name(made[atom]))
        atom = made[atom].invars[0]
    return names


def _has_names_in_jit(jaxpr: Jaxpr) -> bool:
    calls = [e for e in _jax.open_jaxpr(jaxpr).eqns if kind_of(e) is Kind.JIT]
    inner = [eqn.params["jaxpr"] for eqn in calls]
    return any(
        any(find_written_name(e) for e in _jax.open_jaxpr(body).eqns) or _has_names_in_jit(body)
        for body in inner
    )


def retrace(jaxpr: Jaxpr, found: Definitions, added: Sequence[StateWrite]) -> Jaxpr:
    """Trace the program with one more operand for each write in `added`, which adds it."""
    types = [jax.ShapeDtypeStruct(write.shape, write.dtype) for write in added]
    given = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in _jax.open_jaxpr(jaxpr).invars
    ]

    def run(*args: Any) -> list[Any]:
        more = dict(zip([write.name for write in added], args[len(given) :], strict=True))
        return evaluate_defined(
            jaxpr, args[: len(given)], found, lambda key, value: value + more[key]
        )

    return jax.make_jaxpr(run)(*given, *types)
