"""The `Variable`s that a captured function of Keras reads and writes, as arguments and results.

`split_variables` adds the values of `Variable`s to the arguments of a call, and their new values to
its results, which are assigned at the end. So a `Variable` never has a traced value, no compiled
program contains its value as a constant, and an exception on the way leaves it unchanged.

The trace reveals the `Variable`s: the adapter remembers those that the function accesses for the
first time, and splits the call anew. A function that takes the values of variables as arguments,
such as `stateless_call`, accesses none, and its call stays unchanged.

A layer that is built during the trace gets the weights that it would get outside. The losses that
layers add to themselves in a call are results as well. A program fits every call in which the same
layers are trainable: batch norms depend on that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from keras import Layer, Variable
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope

from tapax._frameworks.interface import FunctionCall, Module
from tapax._frameworks.patches import Replacements
from tapax._jax import Function, PyTree, Value
from tapax._marks.context import ContextVariable, without_marks


@dataclasses.dataclass
class _KnownState:
    """The variables that calls of a function have accessed so far, and the layers with losses.

    `ran` has the layers with variables that ran in these calls. `has_built` is true if a call
    created variables, as it does if a layer is not built yet.
    """

    variables: list[Any] = dataclasses.field(default_factory=list)
    layers: list[Any] = dataclasses.field(default_factory=list)
    ran: dict[int, Any] = dataclasses.field(default_factory=dict)
    has_built: bool = False


class _TraceRecord:
    """A record of how a traced function changes variables and the losses of layers."""

    def __init__(self, variables: Sequence[Any]):
        self.ran: dict[int, Any] = {}
        self._numbers = {id(variable): i for i, variable in enumerate(variables)}
        self._values: dict[int, Any] = {}
        self._written: set[int] = set()
        self._touched: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._losses: dict[int, tuple[Any, list[Any]]] = {}
        self._has_learned = False

    def start(self, values: Sequence[Any]) -> None:
        """Set the values of the variables in this trace."""
        pairs = zip(self._numbers, values, strict=True)
        self._values = {key: value for key, value in pairs if value is not None}
        self._written.clear()

    def read(self, variable: Any) -> Any:
        """Return the value of a variable in this trace; None if it is the stored value."""
        self._touched[id(variable)] = variable
        return self._values.get(id(variable))

    def write(self, variable: Any, value: Value) -> None:
        """Set the value of a variable; ignore an unknown variable, since its trace is useless."""
        self._touched[id(variable)] = variable
        if id(variable) in self._numbers or id(variable) in self._made:
            self._written.add(id(variable))
            self._values[id(variable)] = value

    def make(self, variable: Any) -> None:
        """Record that a variable is being created."""
        self._made[id(variable)] = variable

    def change_losses(self, layer: Module) -> None:
        """Record that the losses of a layer are about to change."""
        self._losses.setdefault(id(layer), (layer, list(layer._losses)))

    def written(self) -> dict[int, Any]:
        """Return the new values of variables, by number."""
        known = self._written & self._numbers.keys()
        return {self._numbers[key]: self._values[key] for key in known}

    def take_losses(self, layers: list[Any]) -> dict[int, list[Any]]:
        """Return the changed losses of layers, by number, and restore the old losses."""
        changed = self._layers_with_new_losses()
        layers += [layer for layer in changed if not _is_in(layer, layers)]
        found = {_index(layers, layer): list(layer._losses) for layer in changed}
        self.restore_losses()
        return found

    def restore_losses(self) -> None:
        for layer, before in self._losses.values():
            layer._losses[:] = before
        self._losses.clear()

    def learn(self, known: _KnownState) -> bool:
        """Add state that the call did not split to `known`; return whether there was any."""
        new = [v for key, v in self._touched.items() if key not in self._numbers]
        if known.has_built:  # a function may create variables in every trace
            new = [variable for variable in new if id(variable) not in self._made]
        new = [variable for variable in new if not _is_in(variable, known.variables)]
        layers = [x for x in self._layers_with_new_losses() if not _is_in(x, known.layers)]
        known.variables += new
        known.layers += layers
        known.ran |= {key: layer for key, layer in self.ran.items() if self._has_state(layer)}
        known.has_built |= bool(self._made)
        self._has_learned |= bool(new or layers)
        return self._has_learned

    def _has_state(self, layer: Module) -> bool:
        """Return whether a layer has variables, and had them before the call."""
        variables = layer.variables
        return bool(variables) and not any(id(variable) in self._made for variable in variables)

    def _layers_with_new_losses(self) -> list[Any]:
        return [
            layer
            for layer, before in self._losses.values()
            if list(map(id, layer._losses)) != list(map(id, before))
        ]


def _is_in(value: Any, values: Sequence[Any]) -> bool:
    return any(value is x for x in values)


def _index(values: Sequence[Any], value: Any) -> int:
    return next(i for i, x in enumerate(values) if x is value)


class _ActiveRecord(threading.local):
    """The record of the function that this thread traces."""

    def __init__(self) -> None:
        self.record: _TraceRecord | None = None


_active = _ActiveRecord()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Settings:
    """The settings of layers on which a trace depends: whether each is trainable."""

    trainable: tuple[bool, ...]


def note_layer(layer: Module) -> None:
    """Record that a layer runs."""
    if _active.record is not None:
        _active.record.ran[id(layer)] = layer


# JAX must retrace a jitted function that closes over a model, as it reads the current values.
_trace = ContextVariable[object](None)


@contextlib.contextmanager
def _active_state(record: _TraceRecord | None, scope: Any) -> Iterator[None]:
    """Use the variables of a record and of a stateless scope of Keras within the context."""
    before = _active.record, get_stateless_scope()
    _active.record = record
    global_state.set_global_attribute("stateless_scope", scope)
    try:
        yield
    finally:
        _active.record = before[0]
        global_state.set_global_attribute("stateless_scope", before[1])


@contextlib.contextmanager
def split_variables(call: FunctionCall) -> Iterator[FunctionCall]:
    """Add the values of variables to the arguments and results of a call."""
    known: _KnownState = call.memory.setdefault(__name__, _KnownState())
    variables, outer = tuple(known.variables), (_active.record, get_stateless_scope())
    values = [_value_now(variable) for variable in variables]
    record = _TraceRecord(variables)

    def pure(arguments: PyTree, values: list[Any], settings: _Settings) -> Any:
        del settings
        record.start(values)
        with _trace(object()):
            out = call.run(arguments)
        return out, record.written(), record.take_losses(known.layers)

    def close(result: PyTree) -> Any:
        out, written, losses = result
        with _active_state(*outer):
            for number, value in written.items():
                variables[number].assign(value)
        for number, added in losses.items():
            known.layers[number]._losses[:] = added
        return call.close(out)

    found_more = lambda: record.learn(known) or call.found_more()  # noqa: E731
    if variables or known.layers:
        user_result = lambda result: call.user_result(result[0])  # noqa: E731
        settings = _Settings(tuple(bool(layer.trainable) for layer in known.ran.values()))
        taken = call.arguments, values, settings
        keys = 0, 0, *call.user_keys
        opened = FunctionCall(pure, taken, {}, close, call.memory, user_result, found_more, keys)
    else:
        opened = dataclasses.replace(call, found_more=found_more)
    with _active_state(record, None):
        try:
            yield opened
        finally:
            record.restore_losses()


def replacements() -> Replacements:
    """Yield the replacements in Keras during a trace, except for the methods of layers."""
    wrappers = {"value": _tracked_value, "_direct_assign": _tracked_assignment}
    wrappers |= dict.fromkeys(("__init__", "_deferred_initialize"), _eager_initialization)
    for name, wrap in wrappers.items():
        yield next(cls for cls in Variable.__mro__ if name in cls.__dict__), name, wrap
    for name in ("add_loss", "_clear_losses"):
        yield Layer, name, _tracked_losses


def _stored_value(variable: Any) -> Any:
    """Return the array stored in a variable; None before it has one, and while `fit` has it."""
    return getattr(variable, "_value", None)


def _value_now(variable: Any) -> Any:
    """Return the current value of a variable: in a stateless scope, in a record, or stored."""
    found = _scoped(variable)
    if found is None and _active.record is not None:
        found = _active.record.read(variable)
    return _stored_value(variable) if found is None else found


def _scoped(variable: Any) -> Any:
    scope = get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def _tracked_value(original: Any) -> Any:
    """Wrap the property `value`, to return the value in the trace in the layer's precision."""

    def value(self: Any) -> Any:
        found = None
        if _active.record is not None and _stored_value(self) is not None and _scoped(self) is None:
            found = _active.record.read(self)
        return original.__get__(self) if found is None else self._maybe_autocast(found)

    return property(value, doc=original.__doc__)


def _tracked_assignment(original: Function) -> Any:
    """Wrap an assignment, to record it in the trace unless it is the first value."""

    @functools.wraps(original)
    def direct_assign(self: Any, value: Value) -> None:
        if _active.record is None or _stored_value(self) is None:
            original(self, value)
        else:
            _active.record.write(self, value)

    return direct_assign


def _eager_initialization(original: Function) -> Any:
    """Wrap an initialization, to compute the first value outside of the traced program."""

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        if _active.record is None:
            original(self, *args, **kwargs)
            return
        _active.record.make(self)
        # The initializer may advance the state of a seed generator, which must be kept.
        eager = _active_state(None, get_stateless_scope())
        with eager, without_marks(), jax.ensure_compile_time_eval():
            original(self, *args, **kwargs)

    return initialize


def _tracked_losses(original: Function) -> Any:
    """Wrap a method that adds or removes losses of a layer."""

    @functools.wraps(original)
    def change(self: Any, *args: Any, **kwargs: Any) -> None:
        if _active.record is not None:
            _active.record.change_losses(self)
        original(self, *args, **kwargs)

    return change
