"""brainstate: modules are objects with `State`s, which they change in place.

The adapter observes calls by replacing the methods of all classes while a capture traces. `update`
computes the result of a module and `__call__` calls it, so both are one site, `Net/lin`, with the
method `__call__`, even if the user calls `update` directly. The site of a quantity with a unit is
its mantissa.

brainstate's transforms cache their traces by the types of the arguments alone. While a capture
traces, the adapter adds the marking policy to the key of that cache. So brainstate retraces a
function that was jitted and called before, and does not run the trace of a capture without one.

The `State`s that a captured function reads and writes become arguments and results: see
`_frameworks.brainstate.states`.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import brainevent
import jax
from brainstate import State, TraceContextError, graph, nn, transform
from brainstate.transform import _mapping1, _mapping2, _mapping_core
from brainunit import Quantity

from tapax._frameworks.brainstate import cells, states
from tapax._frameworks.interface import Adapter, FunctionCall, Module, key_path
from tapax._frameworks.module_calls import (
    MethodCall,
    asks_for_inputs,
    mark_inputs,
    mark_result,
    within,
)
from tapax._frameworks.module_paths import running_modules
from tapax._frameworks.patches import PatchedAdapter, Replacements, current, methods
from tapax._jax import Args, Function, Kwargs, PyTree, Value
from tapax._jax.pytrees import map_with_path
from tapax._jaxpr.kinds import Kind, register_primitive
from tapax._marks.context import active_policy, without_marks
from tapax._sites import join, segment

# brainevent multiplies states by sparse matrices, in opaque kernels.
for _kernel in getattr(brainevent, "get_registry", dict)().values():
    register_primitive(_kernel.primitive, Kind.MATRIX_PRODUCT)

_FORWARD = ("__call__", "update")


class Brainstate(PatchedAdapter):
    package = "brainstate"
    base = nn.Module
    recurrent_type = graph.Node
    container_types = (graph.Node,)

    def is_opaque(self, value: PyTree) -> bool:
        return isinstance(value, (graph.Node, State))

    def named_arrays(self, value: PyTree) -> Iterator[tuple[str, Any]]:
        found: Any = {(): value} if isinstance(value, State) else graph.states(value)
        for path, state in found.items():
            prefix = "/".join(map(segment, path))
            try:
                leaves = jax.tree_util.tree_leaves_with_path(state.value)
            except TraceContextError:  # a transform made the state, which has no value outside
                continue
            for keys, x in leaves:
                yield join(prefix, key_path(keys)), x

    def open_call(self, call: FunctionCall) -> contextlib.AbstractContextManager[FunctionCall]:
        return contextlib.nullcontext(states.split_states(call))

    def recurrent_cell(self, module: Module, inputs: Sequence[Any], state: PyTree) -> Any:
        return cells.recurrent_cell(module, inputs, state)

    def stateful_program(self, module: Module, inputs: Sequence[Any], state: PyTree) -> Any:
        return cells.stateful_program(module, inputs, state)

    def _replacements(self) -> Replacements:
        yield transform.StatefulFunction, "get_arg_cache_key", _separate_traces
        yield transform.StatefulFunction, "make_jaxpr", _use_patched_method
        yield _mapping_core, "_build_plan", _unmark_plan
        for module in (_mapping1, _mapping2):
            yield module, "_new_state_probe", _unmark_probe
        yield from methods(self, nn.Module, [nn.Module], _call)


def _separate_traces(original: Function) -> Any:
    """Wrap the key of a transform's cache of traces, to add the marking policy."""

    @functools.wraps(original)
    def get_arg_cache_key(self: Any, *args: Any, compile_if_miss: bool = False, **kwargs: Any):
        here = active_policy()
        if here is None:
            return original(self, *args, compile_if_miss=compile_if_miss, **kwargs)
        if compile_if_miss:
            self.make_jaxpr(*args, **kwargs)  # does nothing if the trace is cached
        key = original(self, *args, **kwargs)
        return key._replace(static_args=(here, key.static_args))

    return get_arg_cache_key


def _unmark_plan(original: Function) -> Any:
    """Wrap the trial run by which `vmap` finds the states of its function, to switch marks off.

    Nothing public tells a trial run from the real one.
    """

    @functools.wraps(original)
    def build_plan(*args: Any, **kwargs: Any) -> Any:
        with without_marks():
            return original(*args, **kwargs)

    return build_plan


def _unmark_probe(original: Function) -> Any:
    @contextlib.contextmanager
    def probe() -> Iterator[None]:
        with without_marks(), original():
            yield

    return probe


def _use_patched_method(original: Function) -> Any:
    """Wrap the tracing of a transform, whose function may be a method bound before the patch."""

    @functools.wraps(original)
    def make_jaxpr(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active_policy() is None:
            return original(self, *args, **kwargs)
        before, self.fun = self.fun, current(self.fun)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.fun = before

    return make_jaxpr


class _BrainstateCalls(threading.local):
    """The modules whose forward methods are running on this thread."""

    def __init__(self) -> None:
        self.modules: list[Any] = []


_calls = _BrainstateCalls()


def _is_being_called(module: Module) -> bool:
    """Return whether a forward method of `module` is the innermost running method."""
    around = running_modules()
    innermost = around[-1].module if around else None
    return innermost is module and any(m is module for m in _calls.modules)


def _call(call: MethodCall) -> Any:
    """Run a method of a module, as `module_calls.called` does; both of `_FORWARD` are one call."""
    adapter, module = call.adapter, call.module
    is_forward = call.method in _FORWARD
    if is_forward and _is_being_called(module):
        return call.run(*call.args, **call.kwargs)
    states.note_module(module)
    method = "__call__" if is_forward else call.method

    def mark_arguments(given: tuple[Args, Kwargs]) -> tuple[Args, Kwargs]:
        return mark_inputs(dataclasses.replace(call, method=method, args=given[0], kwargs=given[1]))

    with within(adapter, module):
        args, kwargs = call.args, call.kwargs
        if asks_for_inputs():
            args, kwargs = _mark_bare(adapter, (args, kwargs), mark_arguments)
        if is_forward:
            _calls.modules.append(module)
        try:
            out = call.run(*args, **kwargs)
        finally:
            if is_forward:
                _calls.modules.pop()
        return _mark_bare(adapter, out, lambda out: mark_result(adapter, module, method, out))


def _mark_bare(adapter: Adapter, value: PyTree, mark: Callable[[Any], Any]) -> Any:
    """Mark a value; the mantissa of a quantity has the name of the quantity."""

    def is_whole(x: Value) -> bool:
        return isinstance(x, Quantity) or adapter.is_opaque(x)

    quantities: dict[Any, Any] = {}

    def bare(keys: tuple[Any, ...], x: Value) -> Any:
        if isinstance(x, Quantity):
            quantities[keys] = x
            return x.mantissa
        return x

    def whole(keys: tuple[Any, ...], x: Value) -> Any:
        if keys in quantities:
            return jax.tree.unflatten(jax.tree.structure(quantities[keys]), [x])
        return x

    marked = mark(map_with_path(bare, value, is_whole))
    return map_with_path(whole, marked, adapter.is_opaque)


ADAPTER = Brainstate()
