"""Modules of brainstate as steps: their hidden states are objects, which they write in place.

A write is seen as it happens, by a hook of the state, and leaves a name in the traced program. So a
state that is written several times in a step has as many definitions, two states that are written
with the same value have one each, and what is written in a body that runs many times is defined
where it leaves that.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from brainstate import HiddenState, graph, transform
from brainunit import get_mantissa
from jax.ad_checkpoint import checkpoint_name

from tapax import _jax
from tapax._jaxpr.bodies import bodies
from tapax._sites.names import segment
from tapax.hidden._definitions import JIT, WRITE, find, is_copy, written_by
from tapax.hidden._groups import HiddenGroup, groups_of
from tapax.hidden._perturbation import HiddenPerturbation, Layout, Written, perturbed
from tapax.hidden._step import HiddenError, Path, bound, check_names, trace


class _Traced:
    """A module traced: its states in the order of the program's operands, and the program.

    The program takes the leaves of the inputs and then the states; it returns what the module puts
    out and then the states.
    """

    def __init__(self, model: Any, inputs: Sequence[Any], *, named: bool):
        found = _states(model)
        self.paths = {id(state): path for path, state in found.items()}
        hidden = [state for state in found.values() if isinstance(state, HiddenState)]
        if not hidden:
            raise HiddenError(
                f"`model`, a {type(model).__name__}, has no hidden states: they come to be with "
                "brainstate.nn.init_all_states(model)."
            )
        with contextlib.ExitStack() as stack:
            for state in hidden if named else ():
                hook = _naming("/".join(self.paths[id(state)]))
                stack.enter_context(state.temporary_hook("write_before", hook))
            self.function = transform.StatefulFunction(model, return_only_write=False)
            self.function.make_jaxpr(*inputs)
        key = self.function.get_arg_cache_key(*inputs)
        self.jaxpr = self.function.get_jaxpr_by_cache(key)
        self.states = list(self.function.get_states_by_cache(key))
        self.out_tree = self.function.get_out_treedef_by_cache(key)
        self.values = [s.value for s in self.states]
        self.types = [_leaf(s, self.path(s)) for s in self.states if isinstance(s, HiddenState)]
        self.names = ["/".join(self.path(s)) for s in self.states]
        own = zip(self.names, self.states, strict=True)
        self.hidden = [n for n, s in own if isinstance(s, HiddenState)]

    def path(self, state: Any) -> Path:
        return self.paths.get(id(state), (f"state{id(state)}",))

    def values_with(self, state: Any) -> list[Any]:
        """The values of all states, with those of hidden ones that are given."""
        given = {"/".join(path): value for path, value in _flat(state)}
        check_names(given, self.hidden)
        return [given.get(n, v) for n, v in zip(self.names, self.values, strict=True)]

    def split(self, values: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values of all states as those of hidden ones, and those of others, in nested dicts."""
        hidden: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, state, value in zip(self.names, self.states, values, strict=True):
            *around, last = self.path(state)
            into = hidden if name in self.hidden else others
            for key in around:
                into = into.setdefault(key, {})
            into[last] = value
        return hidden, others


def _flat(values: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values in nested dicts, by path."""
    if not isinstance(values, dict):
        yield path, values
        return
    for key, value in values.items():
        yield from _flat(value, (*path, key))


def functional(model: Any, inputs: Sequence[Any], state: Any) -> tuple[Any, Any, Any]:
    """A module as a pure step; its other states; and its hidden states, in nested dicts."""
    traced = _Traced(model, inputs, named=False)
    own, params = traced.split(traced.values_with(state or {}))

    def step(params: Any, state: Any, *inputs: Any) -> tuple[Any, Any]:
        given = [
            functools.reduce(operator.getitem, path, state if name in traced.hidden else params)
            for name, path in zip(traced.names, map(traced.path, traced.states), strict=True)
        ]
        new, out = traced.function.jaxpr_call(given, *inputs)
        return traced.split(new)[0], out

    return step, params, own


def groups(model: Any, inputs: Sequence[Any], state: Any) -> list[HiddenGroup]:
    """The hidden states of a module in groups."""
    step, params, own = functional(model, inputs, state)
    objects = _states(model)
    traced = trace(bound(step, params, type(model).__name__), own, inputs)
    return groups_of(traced, [objects[s.path] for s in traced.states])


def perturbation(model: Any, inputs: Sequence[Any], state: Any) -> HiddenPerturbation:
    """A module with a perturbation for every write of its hidden states."""
    traced = _Traced(model, inputs, named=True)
    jaxpr = _inlined(traced.jaxpr) if _names_in_calls(traced.jaxpr) else traced.jaxpr
    inner = _jax.open_jaxpr(jaxpr)
    made = {v: eqn for eqn in inner.eqns for v in eqn.outvars}
    states = dict(zip(traced.names, traced.states, strict=True))
    types = dict(zip(traced.hidden, traced.types, strict=True))
    written: list[Written] = []
    writes: dict[Any, str] = {}
    counts: Counter[str] = Counter()

    def note(name: str) -> str:
        number = counts[name]
        counts[name] += 1
        key = f"{name}@{number}" if number else name
        written.append(Written(key, traced.path(states[name]), states[name], types[name]))
        return key

    for eqn in inner.eqns:
        name = written_by(eqn)
        # What a transform of brainstate hands out is written once more, with the same value.
        if name is not None and name not in _names_of(made, eqn.invars[0]):
            writes[eqn.outvars[0]] = note(name)
    start = len(inner.outvars) - len(jax.tree.leaves(traced.values))
    wanted: dict[int, str] = {}
    for name, value in zip(traced.names, traced.values, strict=True):
        if name in types and name not in _names_of(made, inner.outvars[start]):
            wanted[start] = note(name)
        start += len(jax.tree.leaves(value))
    treedef = jax.tree.structure(tuple(inputs))

    def flat(state: Any, inputs: Sequence[Any]) -> list[Any]:
        leaves, given = jax.tree.flatten(tuple(inputs))
        if given != treedef:
            raise HiddenError(
                f"{type(model).__name__} was traced for inputs of the structure {treedef}, but was "
                f"given {given}. Trace it for these."
            )
        return [*leaves, *jax.tree.leaves(traced.values_with(state))]

    def join(results: Sequence[Any]) -> tuple[Any, Any]:
        out, new = traced.out_tree.unflatten(results)
        return traced.split(new)[0], out

    if state:
        traced.values = traced.values_with(state)
    layout = Layout(tuple(w.name for w in written), flat, join)
    return perturbed(jaxpr, find(jaxpr, wanted, writes), written, layout)


def _states(model: Any) -> dict[Path, Any]:
    """The states of a module by path."""
    found: Any = graph.states(model)
    return {tuple(segment(key) for key in keys): state for keys, state in found.items()}


def _leaf(state: Any, path: Path) -> Any:
    (leaf,) = jax.tree.leaves(get_mantissa(state.value))
    if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
        raise HiddenError(
            f"The hidden state {'/'.join(path)!r} is of type {leaf.dtype}, but a hidden state has "
            "to be of a floating-point type, for there is no derivative by another."
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _naming(name: str) -> Callable[[Any], None]:
    def hook(context: Any) -> None:
        value = context.transformed_value
        value = context.value if value is None else value
        context.transformed_value = jax.tree.map(lambda x: checkpoint_name(x, WRITE + name), value)

    return hook


def _names_of(made: Any, atom: Any) -> set[str]:
    """The writes that a value is of, with copies in between."""
    names = set()
    while not isinstance(atom, _jax.Literal) and atom in made and is_copy(made[atom]):
        names.add(written_by(made[atom]))
        atom = made[atom].invars[0]
    return names


def _names_in_calls(jaxpr: Any) -> bool:
    calls = [e for e in _jax.open_jaxpr(jaxpr).eqns if _jax.kind_of(e) in JIT]
    inner = [body for eqn in calls for body in bodies(eqn)]
    return any(
        any(written_by(e) for e in _jax.open_jaxpr(body).eqns) or _names_in_calls(body)
        for body in inner
    )


def _inlined(jaxpr: Any) -> Any:
    """A program without calls of jitted functions: their equations stand in their places."""

    def run(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        env = dict(_jax.jaxpr_inputs(jaxpr, args))
        inner = _jax.open_jaxpr(jaxpr)

        def read(atom: Any) -> Any:
            return _jax.literal_value(atom) if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in inner.eqns:
            values = [read(v) for v in eqn.invars]
            if _jax.kind_of(eqn) in JIT:
                outs = _jax.in_context(eqn, run, eqn.params["jaxpr"], values)
            else:
                outs = _jax.in_context(eqn, _jax.bind_equation, eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in inner.outvars]

    types = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in _jax.open_jaxpr(jaxpr).invars
    ]
    return jax.make_jaxpr(lambda *args: run(jaxpr, args))(*types)
