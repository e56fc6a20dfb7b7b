"""Recurrent modules of brainstate, whose hidden states are objects that they write in place.

A hook of each state names the written values in the traced program.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from brainstate import HiddenState, graph, transform
from brainunit import get_mantissa

from tapax._frameworks.interface import Module
from tapax._frameworks.recurrent_cells import (
    HiddenError,
    RecurrentCell,
    StatefulProgram,
    StateObject,
    StatePath,
    cast_operands,
    check_names,
    mark_write,
    name_state,
    split_inputs,
)
from tapax._jax import PyTree
from tapax._sites import segment


def recurrent_cell(module: Module, inputs: Sequence[Any], state: PyTree) -> RecurrentCell:
    """Describe a module: its parameters are its other states, its state is nested dicts."""
    traced = _TracedModule(module, inputs, state, name_writes=False)
    hidden, params = traced.split(traced.values)

    def step(params: PyTree, state: PyTree, *inputs: PyTree, **keywords: PyTree) -> Any:
        given = [
            functools.reduce(
                operator.getitem, map(segment, s.path), state if s.hidden_type else params
            )
            for s in traced.states
        ]
        new, out = traced.function.jaxpr_call(given, *inputs, **keywords)
        return traced.split(new)[0], out

    paths, _ = traced.split([s.path for s in traced.states])
    listed = jax.tree.leaves(paths, is_leaf=lambda x: isinstance(x, tuple))
    objects = {s.path: s.object for s in traced.states if s.hidden_type}
    return RecurrentCell(step, params, hidden, listed, objects)


def stateful_program(module: Module, inputs: Sequence[Any], state: PyTree) -> StatefulProgram:
    """Trace a module, and name every write of a hidden state."""
    traced = _TracedModule(module, inputs, state, name_writes=True)
    treedef = jax.tree.structure(tuple(inputs))

    def flatten(state: PyTree, inputs: Sequence[Any]) -> list[Any]:
        leaves, given = jax.tree.flatten(tuple(inputs))
        if given != treedef:
            raise HiddenError(
                f"{type(module).__name__} was traced for inputs of the structure {treedef}, but "
                f"was given inputs of the structure {given}. Trace it for that structure."
            )
        leaves += jax.tree.leaves(traced.replace(state))
        return cast_operands(type(module).__name__, traced.jaxpr, leaves)

    def join(results: Sequence[Any]) -> tuple[Any, Any]:
        out, new = traced.out_tree.unflatten(results)
        return traced.split(new)[0], out

    return StatefulProgram(traced.jaxpr, traced.states, flatten, join)


class _TracedModule:
    """A traced module: its program, its states in the order of the operands, and their values."""

    def __init__(self, module: Module, inputs: Sequence[Any], state: PyTree, *, name_writes: bool):
        found: Any = graph.states(module)
        hidden = {path: s for path, s in found.items() if isinstance(s, HiddenState)}
        if not hidden:
            raise HiddenError(
                f"`model`, a {type(module).__name__}, has no hidden states yet: create them with "
                "brainstate.nn.init_all_states(model)."
            )
        with contextlib.ExitStack() as stack:
            for path, s in hidden.items() if name_writes else ():
                hook = _write_hook(name_state(path))
                stack.enter_context(s.temporary_hook("write_before", hook))
            self.function = transform.StatefulFunction(module, return_only_write=False)
            args, keywords = split_inputs(inputs)
            self.function.make_jaxpr(*args, **keywords)
        key = self.function.get_arg_cache_key(*args, **keywords)
        self.jaxpr = self.function.get_jaxpr_by_cache(key)
        self.out_tree = self.function.get_out_treedef_by_cache(key)
        objects = list(self.function.get_states_by_cache(key))
        paths = {id(s): path for path, s in found.items()}
        self.states = tuple(_describe(s, paths.get(id(s), (f"state{id(s)}",))) for s in objects)
        self.values = [s.value for s in objects]
        self.values = self.replace(state or {})

    def replace(self, state: Mapping[str, Any]) -> list[Any]:
        """Return the values of all states, with those of hidden states replaced from `state`."""
        given = {"/".join(map(str, path)): value for path, value in _flatten(state)}
        check_names(given, [s.name for s in self.states if s.hidden_type])
        return [given.get(s.name, v) for s, v in zip(self.states, self.values, strict=True)]

    def split(self, values: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values of the hidden states and of the other states in nested dicts."""
        hidden: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for state, value in zip(self.states, values, strict=True):
            *around, last = map(segment, state.path)
            into = hidden if state.hidden_type else others
            for key in around:
                into = into.setdefault(key, {})
            into[last] = value
        return hidden, others


def _flatten(values: Any, path: StatePath = ()) -> Iterator[tuple[StatePath, Any]]:
    """Yield the values in nested dicts, by path."""
    if not isinstance(values, dict):
        yield path, values
        return
    for key, value in values.items():
        yield from _flatten(value, (*path, key))


def _describe(state: PyTree, path: StatePath) -> StateObject:
    count = len(jax.tree.leaves(state.value))
    if not isinstance(state, HiddenState):
        return StateObject(path, state, count, None)
    (leaf,) = jax.tree.leaves(get_mantissa(state.value))
    if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
        raise HiddenError(
            f"The hidden state {name_state(path)!r} is of type {leaf.dtype}, but a hidden state "
            "has to be of a floating-point type, because tapax differentiates with respect to it."
        )
    return StateObject(path, state, count, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def _write_hook(name: str) -> Callable[[Any], None]:
    def hook(context: Any) -> None:
        value = context.transformed_value
        value = context.value if value is None else value
        context.transformed_value = mark_write(value, name)

    return hook
