"""The `Variable`s that a captured function of Keras reads and writes, as arrays in and out.

`taken_apart` makes the values of `Variable`s arguments of the function's call, and their new values
results, which are assigned when all is done. So a `Variable` never holds a traced value, its value
is never fixed in what was compiled, and an exception halfway leaves it as it was.

The trace shows which `Variable`s there are: one that the function touches for the first time is
remembered, and the call is taken apart anew. A function that is given the values of variables, as
`stateless_call` is, touches none: its call stays as it is.

A layer that is built during the trace gets the weights that it would get outside. The losses that
layers add to themselves in a call are results as well.
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
    """The variables that calls of a function touched so far, and the layers that added losses.

    `has_built` if variables came to be in a call, as they do if a layer is not built yet.
    """

    variables: list[Any] = dataclasses.field(default_factory=list)
    layers: list[Any] = dataclasses.field(default_factory=list)
    has_built: bool = False


class _TraceRecord:
    """Records how a traced function changes variables and the losses of layers."""

    def __init__(self, variables: Sequence[Any]):
        self._numbers = {id(variable): i for i, variable in enumerate(variables)}
        self._values: dict[int, Any] = {}
        self._written: set[int] = set()
        self._touched: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._losses: dict[int, tuple[Any, list[Any]]] = {}
        self._has_learned = False

    def start(self, values: Sequence[Any]) -> None:
        """Gives the variables their values in this trace."""
        pairs = zip(self._numbers, values, strict=True)
        self._values = {key: value for key, value in pairs if value is not None}
        self._written.clear()

    def read(self, variable: Any) -> Any:
        """The value of a variable in this trace; None if that is the one it holds."""
        self._touched[id(variable)] = variable
        return self._values.get(id(variable))

    def write(self, variable: Any, value: Value) -> None:
        """Gives a variable a value, unless it is not known yet: then the trace is of no use."""
        self._touched[id(variable)] = variable
        if id(variable) in self._numbers or id(variable) in self._made:
            self._written.add(id(variable))
            self._values[id(variable)] = value

    def make(self, variable: Any) -> None:
        """Tells that a variable comes to be."""
        self._made[id(variable)] = variable

    def change_losses(self, layer: Module) -> None:
        """Tells that the losses of a layer are about to change."""
        self._losses.setdefault(id(layer), (layer, list(layer._losses)))

    def written(self) -> dict[int, Any]:
        """The new values of variables, by number."""
        known = self._written & self._numbers.keys()
        return {self._numbers[key]: self._values[key] for key in known}

    def take_losses(self, layers: list[Any]) -> dict[int, list[Any]]:
        """The losses of layers, by number, where they changed; the layers get the old ones back."""
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
        """Adds state that the call did not take apart to what is known; whether there was any."""
        new = [v for key, v in self._touched.items() if key not in self._numbers]
        if known.has_built:  # a function may make variables whenever it is traced
            new = [variable for variable in new if id(variable) not in self._made]
        new = [variable for variable in new if not _is_in(variable, known.variables)]
        layers = [x for x in self._layers_with_new_losses() if not _is_in(x, known.layers)]
        known.variables += new
        known.layers += layers
        known.has_built |= bool(self._made)
        self._has_learned |= bool(new or layers)
        return self._has_learned

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
# A jitted function that closes over a model is traced again in every trace, whose values it reads.
_trace = ContextVariable[object](None)


@contextlib.contextmanager
def _active_state(record: _TraceRecord | None, scope: Any) -> Iterator[None]:
    """Within, variables are those of a record, and of a stateless scope of Keras."""
    before = _active.record, get_stateless_scope()
    _active.record = record
    global_state.set_global_attribute("stateless_scope", scope)
    try:
        yield
    finally:
        _active.record = before[0]
        global_state.set_global_attribute("stateless_scope", before[1])


@contextlib.contextmanager
def taken_apart(call: FunctionCall) -> Iterator[FunctionCall]:
    """The call of a function, with the values of its variables among its arguments and results."""
    known: _KnownState = call.memory.setdefault(__name__, _KnownState())
    variables, outer = tuple(known.variables), (_active.record, get_stateless_scope())
    values = [_value_now(variable) for variable in variables]
    record = _TraceRecord(variables)

    def pure(arguments: PyTree, values: list[Any]) -> Any:
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
        own = lambda result: call.own(result[0])  # noqa: E731
        taken = call.arguments, values
        keys = 0, 0, *call.own_keys
        opened = FunctionCall(pure, taken, {}, close, call.memory, own, found_more, keys)
    else:
        opened = dataclasses.replace(call, found_more=found_more)
    with _active_state(record, None):
        try:
            yield opened
        finally:
            record.restore_losses()


def replacements() -> Replacements:
    """Lists what is replaced in Keras while a function is traced, besides the methods of layers."""
    wrappers = {"value": _tracked_value, "_direct_assign": _tracked_assignment}
    wrappers |= dict.fromkeys(("__init__", "_deferred_initialize"), _eager_initialization)
    for name, wrap in wrappers.items():
        yield next(cls for cls in Variable.__mro__ if name in cls.__dict__), name, wrap
    for name in ("add_loss", "_clear_losses"):
        yield Layer, name, _tracked_losses


def _held(variable: Any) -> Any:
    """The array that a variable holds; None before it has one, and while `fit` holds it instead."""
    return getattr(variable, "_value", None)


def _value_now(variable: Any) -> Any:
    """The value of a variable here: that of a stateless scope, of a record, or its own."""
    found = _scoped(variable)
    if found is None and _active.record is not None:
        found = _active.record.read(variable)
    return _held(variable) if found is None else found


def _scoped(variable: Any) -> Any:
    scope = get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def _tracked_value(original: Any) -> Any:
    """The value of a variable in the trace, cast to the precision of the layer that reads it."""

    def value(self: Any) -> Any:
        found = None
        if _active.record is not None and _held(self) is not None and _scoped(self) is None:
            found = _active.record.read(self)
        return original.__get__(self) if found is None else self._maybe_autocast(found)

    return property(value, doc=original.__doc__)


def _tracked_assignment(original: Function) -> Any:
    """The assignment of a value to a variable in the trace, unless it is its first value."""

    @functools.wraps(original)
    def direct_assign(self: Any, value: Value) -> None:
        if _active.record is None or _held(self) is None:
            original(self, value)
        else:
            _active.record.write(self, value)

    return direct_assign


def _eager_initialization(original: Function) -> Any:
    """What gives a variable its first value, computed outside of the traced program."""

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        if _active.record is None:
            original(self, *args, **kwargs)
            return
        _active.record.make(self)
        # It may draw from a generator of seeds, whose state is another from then on.
        eager = _active_state(None, get_stateless_scope())
        with eager, without_marks(), jax.ensure_compile_time_eval():
            original(self, *args, **kwargs)

    return initialize


def _tracked_losses(original: Function) -> Any:
    """Wraps a method that adds or removes losses of a layer."""

    @functools.wraps(original)
    def change(self: Any, *args: Any, **kwargs: Any) -> None:
        if _active.record is not None:
            _active.record.change_losses(self)
        original(self, *args, **kwargs)

    return change
