"""The `State`s that a captured function of brainstate reads and writes, as arguments and results.

`split_states` adds the values of `State`s to the arguments of a call, and their new values to its
results, which are written at the end. So a `State` never has a traced value, no compiled program
contains its value as a constant, and an exception on the way leaves it unchanged.

The adapter finds `State`s in the modules among the arguments and among the values that the function
closes over. Tracing the function reveals others: brainstate reports every accessed `State` to a
`StateTraceStack`. If one of them is new, the adapter remembers it together with the modules that
ran, and splits the call anew. From the second call on nothing is traced.

A program fits every call with equal *settings*: the attributes of the modules and brainstate's
environment, except `t` and `i`, which change with every step and are arguments. The adapter
identifies `State`s by their positions: a `State` that replaces another is its successor.

A `State` that the function makes, as `init_state` does, also gets its value at the end. When the
program runs a second time, a copy replaces the `State`, as the function would make a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from brainstate import (
    State,
    StateTraceStack,
    TraceContextError,
    catch_new_states,
    environ,
    graph,
    random,
)
from jax.core import Tracer

from tapax._frameworks.closures import closed_over
from tapax._frameworks.interface import FunctionCall, Module
from tapax._frameworks.patches import current
from tapax._jax import PyTree
from tapax._jax.pytrees import map_in_order
from tapax._marks.sow import is_array

# While one thread traces, the states have its traced values, so other threads wait.
_lock = threading.RLock()
_CLOCK = (environ.I, environ.T)


class _RanModules(threading.local):
    """The modules whose methods have run since the current trace on this thread began."""

    def __init__(self) -> None:
        self.modules: dict[int, Any] = {}


_running = _RanModules()


def note_module(module: Module) -> None:
    """Record that a method of a module runs."""
    _running.modules.setdefault(id(module), module)


@contextlib.contextmanager
def _modules_that_run() -> Iterator[dict[int, Any]]:
    before, _running.modules = _running.modules, {}
    try:
        yield _running.modules
    finally:
        _running.modules = {**before, **_running.modules}


class _Identity:
    """A reference that compares its object by identity."""

    def __init__(self, value: PyTree):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StaticLeaf:
    """A part of a pytree structure that is neither an argument nor a result."""

    value: Any


_NO_ARGUMENT = _StaticLeaf(None)


@dataclasses.dataclass(frozen=True, eq=False)
class _StateEffects:
    """The `State`s that a function writes, by number, and those that it makes.

    `owners` lists the attributes of modules with new `State`s: the module, the name, the value.
    """

    written: tuple[int, ...]
    made: tuple[State, ...]
    owners: tuple[tuple[Any, str, Any], ...]


def _is_node(value: PyTree) -> bool:
    return isinstance(value, (graph.Node, State))


@functools.cache
def _kind(cls: type) -> Any:
    """Return the base class that determines the settings of values; None to ask JAX."""
    if issubclass(cls, (bool, int, str, bytes, np.generic, type(None))):
        return object
    if cls in (list, tuple):
        return list
    kinds = (float, complex), (dict,), (State,), (graph.Node,)
    return next((known[0] for known in kinds if issubclass(cls, known)), None)


class _StateInventory:
    """The states in some objects, numbered; the nodes; and the settings of all of them.

    Every call compares settings, so they are plain tuples. Objects that compare by identity appear
    in them by `id`; `alive` keeps these objects alive, so that no other gets the `id`.
    """

    def __init__(self) -> None:
        self.states: list[State] = []
        self.nodes: list[Any] = []
        self.alive: list[Any] = []
        self.fixed: list[Any] = []
        self._seen: dict[int, tuple[str, int]] = {}

    def __contains__(self, value: PyTree) -> bool:
        return id(value) in self._seen

    def add(self, value: PyTree) -> None:
        """Add the states, nodes and settings in a value."""
        self.fixed.append(self._settings(value))

    def _settings(self, value: PyTree) -> Any:
        """Return the fixed parts of a value in a comparable form."""
        cls = type(value)
        kind = _kind(cls)
        if kind is object:
            return cls, value
        if kind is float:
            return repr(value)  # -0.0 is not 0.0
        if kind is list:
            return cls, tuple(map(self._settings, value))
        if kind is dict:
            return cls, tuple((key, self._settings(part)) for key, part in value.items())
        if kind is None:
            parts, structure = jax.tree.flatten(value)
            if len(parts) == 1 and parts[0] is value:
                return self._identity(value)
            return structure, tuple(map(self._settings, parts))
        known = self._seen.get(id(value))
        if known is not None:
            return known
        into = self.states if kind is State else self.nodes
        self._seen[id(value)] = known = cls.__name__, len(into)
        into.append(value)
        if kind is State:
            return cls, known
        parts = tuple([(name, self._settings(part)) for name, part in vars(value).items()])
        return self._identity(value), parts

    def _identity(self, value: PyTree) -> int:
        self.alive.append(value)
        return id(value)

    def value(self, state: State) -> Any:
        """Return the value of a state as an argument."""
        try:
            value = state.value
        except TraceContextError:  # a transform made the state, which has no value outside
            return _NO_ARGUMENT
        if all(map(is_array, jax.tree.leaves(value))):
            return value
        self.add(value)
        return _NO_ARGUMENT


@dataclasses.dataclass(frozen=True, eq=False)
class _Settings:
    """The settings of a function; equal settings are one object."""

    alive: list[Any]


_plain: dict[Any, _Settings] = {}


def split_states(call: FunctionCall) -> FunctionCall:
    """Add the values of states to the arguments and results of a call."""
    given = [leaf for leaf in jax.tree.leaves(call.arguments) if _is_node(leaf)]
    environment = environ.all()
    clock = {name: environment.pop(name) for name in _CLOCK if name in environment}
    with _lock:
        learned = call.memory.setdefault((__name__, *map(_Identity, given)), [])
        inventory = _StateInventory()
        for part in (environment, given, _closed_over_nodes(call.fn), learned):
            inventory.add(part)
        if inventory.states:
            inventory.add(random.DEFAULT)
        values = tuple(map(inventory.value, inventory.states))
        # Functions without states or modules share their settings.
        memory = call.memory if inventory.states or inventory.nodes else _plain
        settings = memory.setdefault(tuple(inventory.fixed), _Settings(inventory.alive))
    taken = _OpenedCall(call, inventory, learned)
    added = values, clock, _StaticLeaf(settings)
    same = call.fn, call.args, call.kwargs, taken.close, call.memory
    user_result = lambda result: call.user_result(result[0])  # noqa: E731
    found_more = lambda: taken.found_more or call.found_more()  # noqa: E731
    keys = 1, *call.user_keys
    return _ExtendedCall(*same, user_result, found_more, keys, taken=taken, added=added)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ExtendedCall(FunctionCall):
    """A call with more arguments than the function takes."""

    taken: _OpenedCall
    added: Any

    @property
    def arguments(self) -> Any:
        return self.added, self.taken.call.arguments

    def run(self, arguments: PyTree) -> Any:
        return self.taken.run(*arguments)


class _OpenedCall:
    """A call with split states, which knows how to run it and how to write its results."""

    def __init__(self, call: FunctionCall, inventory: _StateInventory, learned: list[Any]):
        self.call = call
        self._inventory = inventory
        self._learned = learned
        self.found_more = False
        self._effects: list[_StateEffects] = []

    def run(self, added: Any, arguments: PyTree) -> Any:
        """Run the call; return its result, and the values of the `State`s it writes and makes."""
        values, clock, _ = added
        given = {id(s): v for s, v in zip(self._inventory.states, values, strict=True)}
        unknown: list[State] = []

        def enter(state: State) -> Any:
            before = stack.original_state_values[-1]
            if id(state) not in given:
                unknown.append(state)
            value = given.get(id(state), _NO_ARGUMENT)
            return before if value is _NO_ARGUMENT else value

        stack = StateTraceStack(new_arg=enter)
        with self._exclusive(), catch_new_states() as made, _modules_that_run() as modules:
            try:
                with stack, environ.context(**clock):
                    call = dataclasses.replace(self.call, fn=current(self.call.fn))
                    out = call.run(arguments)
                self.found_more = bool(unknown)
                if unknown:
                    return self._learn(unknown, modules)
                return self._results(out, stack, made.get_states(), modules)
            finally:
                # Bypass `restore_value`, which refuses a value with another structure.
                for state, value in zip(stack.states, stack.original_state_values, strict=True):
                    vars(state)["_value"] = value
                for state in made.get_states():
                    if any(isinstance(x, Tracer) for x in jax.tree.leaves(vars(state)["_value"])):
                        state._invalidate_trace_value()

    def _exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Keep other threads from using the states, unless the function is known to use none."""
        return _lock if self._inventory.states else contextlib.nullcontext()

    def _learn(self, unknown: list[State], modules: dict[int, Any]) -> None:
        """Remember states, and the modules with these states, which may replace them."""
        for module in modules.values():
            inside = _StateInventory()
            inside.add(module)
            if any(s in inside and s not in self._inventory for s in unknown):
                self._inventory.add(module)
                self._learned.append(module)
        for state in unknown:
            if state not in self._inventory:
                self._inventory.add(state)
                self._learned.append(state)

    def _results(
        self, out: PyTree, stack: StateTraceStack, new: list[State], modules: dict[int, Any]
    ) -> Any:
        written = stack.get_write_states()
        numbers = {id(state): i for i, state in enumerate(self._inventory.states)}
        made = [state for state in new if self._inventory.value(state) is not _NO_ARGUMENT]
        nodes = {**{id(node): node for node in self._inventory.nodes}, **modules}
        owners = [
            (node, name, part)
            for node in nodes.values()
            for name, part in vars(node).items()
            if _replaced(part, {id(state): None for state in made}) is not part
        ]
        effects = _StateEffects(tuple(numbers[id(s)] for s in written), tuple(made), tuple(owners))
        self._effects.append(effects)
        out = map_in_order(lambda x: _StaticLeaf(_Identity(x)) if _is_node(x) else x, out)
        return out, [s.value for s in written], [s.value for s in made], _StaticLeaf(effects)

    def close(self, result: PyTree) -> Any:
        """Write the states, and return the result of the function."""
        out, written, made, fixed = result
        effects: _StateEffects = fixed.value
        traced = effects in self._effects
        with _lock:
            for number, value in zip(effects.written, written, strict=True):
                self._inventory.states[number].value = value
            new = {id(state): state if traced else state.copy() for state in effects.made}
            for state, value in zip(new.values(), made, strict=True):
                state.value = value
                if traced:
                    state.decrease_stack_level()  # the state was made inside a trace stack
            for node, name, part in effects.owners:
                vars(node)[name] = _replaced(part, new)
        is_fixed = lambda x: isinstance(x, _StaticLeaf)  # noqa: E731
        out = map_in_order(lambda x: x.value.value if is_fixed(x) else x, out, is_leaf=is_fixed)
        return self.call.close(out)


def _replaced(value: PyTree, new: dict[int, Any]) -> Any:
    """Replace some states in the value of an attribute; return `value` itself if it has none."""
    if isinstance(value, State):
        return new.get(id(value), value)
    if type(value) in (list, tuple):
        parts = [_replaced(part, new) for part in value]
        same = all(a is b for a, b in zip(parts, value, strict=True))
        return value if same else type(value)(parts)
    if type(value) is dict:
        parts = {key: _replaced(part, new) for key, part in value.items()}
        return value if all(parts[key] is value[key] for key in value) else parts
    return value


def _closed_over_nodes(fn: Any) -> list[Any]:
    """Return the modules and states over which a function closes, or whose method it is."""
    return [value for _, value in closed_over(fn) if _has_nodes(value)]


def _has_nodes(value: PyTree) -> bool:
    if type(value) is dict:
        value = list(value.values())
    return _is_node(value) or (type(value) in (list, tuple) and any(map(_is_node, value)))
