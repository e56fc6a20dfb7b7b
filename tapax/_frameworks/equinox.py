"""Equinox: modules are frozen pytrees, which every transformation flattens and rebuilds.

The adapter observes calls by replacing the methods of all classes while a capture traces. It also
observes the call of a method that was bound before, such as `jax.vmap(model.encode)`.

`filter_jit`, `filter_vmap`, `Partial` and others return an `eqx.Module` too, but it is a wrapper
and not a module of the user: it has no site and adds nothing to a path. A wrapper contains a copy
of the wrapped module, and passes another copy to the wrapped function. So the adapter enters the
scope of that module around the call of the wrapper, where its path is known; the copy inside is
then taken for the running module.

The modules of diffrax, optimistix and others run the user's model. They are not scopes: a module in
one of their attributes is named from the root of the user's model.

Python numbers in a module are static, as they are for `filter_jit`.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Container, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox.internal._loop import bounded, checkpointed, loop
from equinox.internal._nontraceable import nonbatchable_p, nondifferentiable_backward_p

from tapax._frameworks.attention import marks_result
from tapax._frameworks.interface import FunctionCall, Module
from tapax._frameworks.module_calls import (
    MethodCall,
    asks_for_inputs,
    mark_inputs,
    mark_result,
    within,
)
from tapax._frameworks.module_paths import adopt_part, find, running_modules
from tapax._frameworks.patches import PatchedAdapter, Replacements, methods, subclasses
from tapax._frameworks.recurrent_cells import RecurrentCell, check_inputs, pair_paths
from tapax._jax import Args, Function, Kwargs, PyTree
from tapax._jaxpr.kinds import Kind, register_primitive
from tapax._marks.active_examples import marks_count_where
from tapax._marks.context import active_policy
from tapax._marks.scopes import ModuleScope
from tapax._sites import is_machinery, join, segment

# The result of `filter_make_jaxpr` runs elsewhere, in another scope.
_MAKE_JAXPR = type(eqx.filter_make_jaxpr(lambda: None))
_JIT: Any = type(eqx.filter_jit(lambda: None))
_BOUND: Any = type(eqx.nn.Sequential([]).is_stateful)
_ATTENTION = sys.modules[eqx.nn.MultiheadAttention.__module__]

# Equinox's loops pass values that must not be mapped or differentiated through these primitives.
_CHECKS: tuple[Any, ...] = (nonbatchable_p, nondifferentiable_backward_p)
for _check in _CHECKS:
    register_primitive(_check, Kind.COPY)


class Equinox(PatchedAdapter):
    package = "equinox"
    base = eqx.Module
    recurrent_type = eqx.Module

    def is_module(self, value: PyTree) -> bool:
        return isinstance(value, eqx.Module) and _is_users(type(value))

    def wraps(self, value: PyTree) -> bool:
        cls = type(value)
        return isinstance(value, eqx.Module) and (_is_wrapper(cls) or is_machinery(cls))

    def children(self, module: Module) -> Iterator[tuple[str, Any]]:
        named = not _is_wrapper(type(module))
        return ((segment(key) if named else "", part) for key, part in vars(module).items())

    def is_opaque(self, value: PyTree) -> bool:
        # A module that cannot be called may be a record of results.
        if isinstance(value, (eqx.nn.State, eqx.nn.StateIndex)):
            return True
        return isinstance(value, eqx.Module) and callable(value)

    def has_repeatable_calls(self, fn: Function) -> bool:
        return isinstance(fn, eqx.Module)

    def static_parts(self, call: FunctionCall) -> Any:
        fn = call.fn
        while fn is not None:
            if isinstance(fn, _JIT):
                return lambda value: True
            fn = _wrapped(fn)
        return lambda value: isinstance(value, eqx.Module)

    def open_call(self, call: FunctionCall) -> contextlib.AbstractContextManager[FunctionCall]:
        # `model.__call__` is a bound method of Python; for other methods Equinox has a class.
        if inspect.ismethod(call.fn) and isinstance(call.fn.__self__, eqx.Module):
            bound = _BOUND(call.fn.__func__, call.fn.__self__)
            call = dataclasses.replace(call, fn=bound)
        return contextlib.nullcontext(call)

    def recurrent_cell(self, module: Module, inputs: Sequence[Any], state: PyTree) -> RecurrentCell:
        """Describe a module; a cell of Equinox takes its state last and starts from zeros."""
        check_inputs(module, inputs)
        params, rest = eqx.partition(module, eqx.is_array)
        is_lstm = isinstance(module, eqx.nn.LSTMCell)
        if not is_lstm and not isinstance(module, eqx.nn.GRUCell):
            run = lambda params, *args, **kwargs: eqx.combine(params, rest)(*args, **kwargs)  # noqa: E731
            return RecurrentCell(run, params, state)

        def step(params: PyTree, state: PyTree, *inputs: PyTree, **keywords: PyTree) -> Any:
            new = eqx.combine(params, rest)(*inputs, state, **keywords)
            return new, new[0] if is_lstm else new

        if state is not None:
            return RecurrentCell(step, params, state)
        zeros = jnp.zeros(module.hidden_size, module.weight_hh.dtype)
        initial = (zeros, zeros) if is_lstm else zeros
        return RecurrentCell(step, params, initial, pair_paths(initial, "h", "c"))

    def _replacements(self) -> Replacements:
        wrappers = [cls for cls in subclasses(eqx.Module) if not _is_users(cls)]
        for cls, name, wrap in methods(self, eqx.Module, skip=wrappers):
            # The default of a field is an attribute of the class, which may be a function.
            if name not in _fields(cls) and cls is not eqx.nn.Shared:
                yield cls, name, functools.partial(_around, wrap)
        yield _ATTENTION, "dot_product_attention_weights", marks_result
        yield eqx.nn.Shared, "__call__", functools.partial(_shared, self)
        others = [cls for cls in subclasses(eqx.Module) if not is_machinery(cls)]
        for cls, name, wrap in methods(self, eqx.Module, skip=others, call=_run_machinery):
            if name not in _fields(cls):
                yield cls, name, functools.partial(_around, wrap)
        for loops in (bounded, checkpointed, loop):
            yield loops, "common_rewrite", _guarded_loop
        for cls in wrappers:
            if "__call__" in cls.__dict__ and _is_wrapper(cls) and cls is not _MAKE_JAXPR:
                yield cls, "__call__", _CALLS.get(cls, functools.partial(_transformed, self))


@functools.cache
def _is_users(cls: type) -> bool:
    """Return whether a class is a layer or a model, and not part of Equinox's machinery."""
    if cls is eqx.Module or _is_wrapper(cls) or is_machinery(cls):
        return False
    package, _, rest = cls.__module__.partition(".")
    return package != "equinox" or (rest.startswith("nn.") and _has_call(cls))


@functools.cache
def _is_wrapper(cls: type) -> bool:
    """Return whether the instances of a class wrap a function or a module."""
    if isinstance(getattr(cls, "__wrapped__", None), property):
        return True  # `eqx.module_update_wrapper` requires such a property
    package, _, rest = cls.__module__.partition(".")
    return package == "equinox" and not rest.startswith("nn.") and _has_call(cls)


def _run_machinery(call: MethodCall) -> Any:
    """Run a method of a library that runs the user's model; it is not a scope for calls inside."""
    adapter, module = call.adapter, call.module
    if not is_machinery(type(module)):
        return call.run(*call.args, **call.kwargs)  # a user's subclass
    name = adapter.name(module)
    scope = ModuleScope(name, name)
    args, kwargs = call.args, call.kwargs
    if asks_for_inputs():
        with within(adapter, module, scope):
            args, kwargs = mark_inputs(call)
    out = call.run(*args, **kwargs)
    with within(adapter, module, scope):
        return mark_result(adapter, module, call.method, out)


def _around(wrap: Function, original: Function) -> Any:
    """Wrap a method, and set `__wrapped__` to the innermost function.

    Equinox warns about a method that wraps an object with numbers, such as the wrappers that
    `filter_checkpoint` and `filter_vmap` make.
    """
    method = wrap(original)
    method.__wrapped__ = _innermost(original)
    return method


def _fields(cls: type) -> Container[str]:
    """Return the names of the fields of a module, or of a mixin, which has none."""
    return getattr(cls, "__dataclass_fields__", ())


def _has_call(cls: type) -> bool:
    return any("__call__" in base.__dict__ for base in cls.__mro__)


def _wrapped(fn: Function) -> Any:
    """Return the function or object that `fn` wraps; None if it wraps nothing."""
    for name in ("__self__", "func", "fun", "__wrapped__"):
        inner = getattr(fn, name, None)
        if inner is not None and not isinstance(inner, types.ModuleType):
            return inner
    return None


def _transformed(adapter: Equinox, original: Function) -> Any:
    """Wrap the call of a transformed function, to enter the scope of its module."""

    @functools.wraps(original)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if active_policy() is None:
            return original(self, *args, **kwargs)
        with _entered(adapter, self, args, kwargs):
            return original(self, *args, **kwargs)

    return call


def _entered(adapter: Equinox, wrapper: Any, args: Args, kwargs: Kwargs) -> Any:
    module: Any = wrapper
    while module is not None and not adapter.is_module(module):
        module = _wrapped(module)
    if module is not None:
        return within(adapter, module, find(adapter, wrapper))
    if is_machinery(_innermost(wrapper)):
        return contextlib.nullcontext()
    # A function with one part of a model as an argument runs that part.
    leaves = jax.tree.leaves((args, kwargs), is_leaf=adapter.is_module)
    modules = {id(leaf): leaf for leaf in leaves if adapter.is_module(leaf)}
    scopes = [(module, find(adapter, module)) for module in modules.values()]
    parts = [(module, scope) for module, scope in scopes if scope is not None]
    return within(adapter, *parts[0]) if len(parts) == 1 else contextlib.nullcontext()


def _shared(adapter: Equinox, original: Function) -> Any:
    """Wrap the call of `Shared`, which returns copies of its modules with tied arrays."""

    @functools.wraps(original)
    def call(self: Any, /) -> Any:
        out = original(self)
        if active_policy() is None:
            return out
        scope = find(adapter, self) if running_modules() else None
        if scope is not None:
            running_modules()[-1 - scope.up].adopt(out, join(scope, "pytree"))
        elif not running_modules():
            adopt_part(adapter, self, out, "pytree")
        return out

    return call


def _bound(original: Function) -> Any:
    """Wrap the call of a bound method, which may have been bound before its class was patched."""

    @functools.wraps(original)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if active_policy() is None:
            return original(self, *args, **kwargs)
        return _current(self.__func__, self.__self__)(self.__self__, *args, **kwargs)

    return call


def _partial(original: Function) -> Any:
    """Wrap the call of a `Partial`; a method under `filter_jit` is one."""

    @functools.wraps(original)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if active_policy() is None or not self.args:
            return original(self, *args, **kwargs)
        func = _current(self.func, self.args[0])
        return func(*self.args, *args, **kwargs, **self.keywords)

    return call


def _current(method: Any, module: Module) -> Any:
    """Return the patched method of a module if `method` is the unpatched one."""
    name = getattr(method, "__name__", "")
    if isinstance(module, eqx.Module) and _is_users(type(module)):
        now = inspect.getattr_static(type(module), name, None)
        before = getattr(now, "__wrapped__", None)
        if before is not None and _innermost(before) is _innermost(method) is not now:
            return now
    return method


def _guarded_loop(original: Function) -> Any:
    """Wrap Equinox's rewriting of a loop, so that marks in the body count for active examples only.

    Under `vmap` such a loop runs until the last example is done. Each example carries a flag that
    says whether it is active, but the body runs for all of them.
    """

    @functools.wraps(original)
    def rewrite(*args: Any, **kwargs: Any) -> Any:
        test, body, init, buffers = original(*args, **kwargs)

        def guarded(carry: tuple[Any, ...]) -> Any:
            _, active, *_ = carry
            with marks_count_where(active) if active_policy() is not None else _NOTHING:
                return body(carry)

        return test, guarded, init, buffers

    return rewrite


def _innermost(fn: Function) -> Any:
    while (inner := _wrapped(fn)) is not None:
        fn = inner
    return fn


_NOTHING = contextlib.nullcontext()
_CALLS = {eqx.Partial: _partial, _BOUND: _bound}

ADAPTER = Equinox()
