"""Keras 3 on its JAX backend: layers know their paths, and have their state in `Variable`s.

The adapter observes calls by replacing the method `call` of all classes while a capture traces. The
name of a layer is its path in Keras, which its weights have too: `net/block_1/dense`. Keras gives
no path to a layer without weights; the adapter uses the path that Keras would give it.

The `Variable`s that a captured function reads and writes become arguments and results: see
`_frameworks.keras.variables`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from jax.core import Tracer
from keras.src import backend
from keras.src.backend.config import is_nnx_enabled
from keras.src.backend.jax import trainer

from tapax._frameworks.attention import marks_result, marks_softmax
from tapax._frameworks.interface import Adapter, FunctionCall, Module
from tapax._frameworks.keras import variables
from tapax._frameworks.module_calls import (
    MethodCall,
    asks_for_inputs,
    mark_inputs,
    mark_result,
    within,
)
from tapax._frameworks.module_paths import running_modules, scope_of_named
from tapax._frameworks.patches import Patch, Replacements, methods
from tapax._jax import PyTree, Value
from tapax._sites import join

_FORWARD = ("call", "quantized_call")
_BASE_METHODS = frozenset(dir(keras.Model))


class Keras(Adapter):
    package = "keras"

    def __init__(self) -> None:
        self._patch = Patch(self._replacements)

    def is_module(self, value: PyTree) -> bool:
        return isinstance(value, keras.Layer)

    def children(self, module: Module) -> Iterator[tuple[str, Any]]:
        return ((layer.name, layer) for layer in module._layers)

    def name(self, module: Module) -> str:
        return module.path or join(module._parent_path or "", module.name)

    def path(self, model: Module, part: Module, path: str) -> str:
        return self.name(part)

    def named_arrays(self, value: PyTree) -> Iterator[tuple[str, Any]]:
        for variable in value.variables:
            yield variable.path.partition("/")[2], variable.value

    def maker(self, model: Module) -> Callable[..., Any] | None:
        return model if self.is_module(model) and not model.built else None

    def has_site(self, module: Module) -> bool:
        return not isinstance(module, keras.layers.InputLayer)

    def observe_calls(self) -> contextlib.AbstractContextManager[Any]:
        return self._patch()

    def open_call(self, call: FunctionCall) -> contextlib.AbstractContextManager[FunctionCall]:
        return variables.split_variables(call)

    def _replacements(self) -> Replacements:
        yield from variables.replacements()
        for cls in (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention):
            yield cls, "_masked_softmax", marks_result
        yield keras.layers.Attention, "_apply_scores", marks_softmax
        yield trainer, "np", _NumPyOfTracers
        for cls, name, wrap in methods(self, keras.Layer, skip=[], call=_call):
            is_keras = cls.__module__.partition(".")[0] == self.package
            if name in _FORWARD or not (is_keras or name in _BASE_METHODS):
                yield cls, name, wrap


class _NumPyOfTracers:
    """NumPy for Keras's trainer, which converts predictions; traced values stay as they are."""

    def __init__(self, numpy: Any):
        self._numpy = numpy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numpy, name)

    def array(self, value: Value) -> Any:
        return value if isinstance(value, Tracer) else self._numpy.array(value)


def _call(call: MethodCall) -> Any:
    """Run a method of a layer, as `module_calls.called` does."""
    adapter, module = call.adapter, call.module
    if _is_graph(module):
        return call.run(*call.args, **call.kwargs)
    variables.note_layer(module)
    call = dataclasses.replace(call, method=_site_method(call.method))
    with within(adapter, module, scope_of_named(adapter, module)):
        given = call.args, call.kwargs
        args, kwargs = _masked(given, mark_inputs(call)) if asks_for_inputs() else given
        out = call.run(*args, **kwargs)
        return _masked(out, mark_result(adapter, module, call.method, out))


def _site_method(method: str) -> str:
    return "__call__" if method in _FORWARD else method


def _is_graph(module: Module) -> bool:
    """Return whether the running `Sequential` wraps this functional model."""
    around = running_modules()
    return bool(around) and getattr(around[-1].module, "_functional", None) is module


def _masked(out: PyTree, marked: PyTree) -> Any:
    """Copy the masks that Keras attached to unmarked arrays to the marked ones."""
    for before, after in zip(jax.tree.leaves(out), jax.tree.leaves(marked), strict=True):
        mask = None if after is before else backend.get_keras_mask(before)
        if mask is not None:
            backend.set_keras_mask(after, mask)
    return marked


# If NNX is enabled in Keras, layers are modules of NNX.
ADAPTER = None if is_nnx_enabled() else Keras()
