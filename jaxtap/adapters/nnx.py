"""Flax NNX: modules are objects with attributes; their state is changed in place.

Calls are seen by replacing the methods of all classes while a capture traces. Arguments that hold
modules, optimizers, random streams or variables are taken apart into arrays and put together again
inside, by NNX's own `update_context`, which is what `nnx.jit` does: afterwards they are as they
would be without capture.

`self.sow` and `self.perturb` are marks. The form of `sow` that stores an attribute on the module
does so outside of a capture only: inside, it would grow the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jaxtap._mark import mark, marking
from jaxtap._modules import Adapter, FunctionCall, within
from jaxtap._patch import Patch, Replacements, methods
from jaxtap._scopes import segment

_BASES = [cls for cls in nnx.Module.__mro__ if cls is not object]
_CONTAINERS = [getattr(nnx, name) for name in ("List", "Dict") if hasattr(nnx, name)]
_TAG = "jaxtap"


class NNX(Adapter):
    package = "flax"

    def __init__(self) -> None:
        self._patch = Patch(self._replacements)

    def is_module(self, value: Any) -> bool:
        return isinstance(value, nnx.Module)

    def children(self, module: Any) -> Iterator[tuple[str, Any]]:
        return ((segment(key), value) for key, value in vars(module).items())

    def is_opaque(self, value: Any) -> bool:
        return _is_node(value)

    def seen(self) -> contextlib.AbstractContextManager[Any]:
        return self._patch()

    def _replacements(self) -> Replacements:
        yield from methods(self, nnx.Module, skip=[*_BASES, *_CONTAINERS])
        yield nnx.Module, "sow", functools.partial(_sow, self)
        yield nnx.Module, "perturb", functools.partial(_perturb, self)

    @contextlib.contextmanager
    def opened(self, call: FunctionCall) -> Iterator[FunctionCall]:
        nodes = _Nodes()
        fn = nodes.take_from_function(call.fn)
        args, kwargs = nodes.take((call.args, call.kwargs))
        if not nodes.taken:
            yield call
            return

        def pure(graphdef: Any, state: Any, args: Any, kwargs: Any) -> Any:
            with nnx.merge_context(_TAG, inner=True) as context:
                inner = context.merge(graphdef, state)
            args, kwargs = _fill((args, kwargs), inner)
            out = fn(inner)(*args, **kwargs)
            returned = _Nodes()
            out = returned.take(out)
            with nnx.split_context(_TAG) as context:
                return out, *context.split((inner, tuple(returned.taken)))

        def close(result: Any) -> Any:
            out, graphdef, state = result
            with nnx.merge_context(_TAG, inner=False) as context:
                _, returned = context.merge(graphdef, state)
            return call.close(_fill(out, returned))

        with nnx.update_context(_TAG):
            with nnx.split_context(_TAG) as context:
                graphdef, state = context.split(tuple(nodes.taken))
            yield FunctionCall(pure, (graphdef, state, args, kwargs), {}, close)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where an object was taken from."""

    number: int


def _is_node(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


class _Nodes:
    """Objects with state, taken out of a structure."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def _slot(self, value: Any) -> Any:
        if not _is_node(value):
            return value
        for number, known in enumerate(self.taken):
            if known is value:
                return _Slot(number)
        self.taken.append(value)
        return _Slot(len(self.taken) - 1)

    def take(self, tree: Any) -> Any:
        """The structure with a slot in the place of each."""
        return jax.tree.map(self._slot, tree, is_leaf=_is_node)

    def take_from_function(self, fn: Any) -> Callable[[Any], Any]:
        """A function that makes `fn` from other objects in the place of those it holds."""
        if _is_node(fn):
            slot = self._slot(fn)
            return lambda nodes: nodes[slot.number]
        if inspect.ismethod(fn) and _is_node(fn.__self__):
            slot, name = self._slot(fn.__self__), fn.__name__
            return lambda nodes: getattr(nodes[slot.number], name)
        if isinstance(fn, functools.partial):
            inner = self.take_from_function(fn.func)
            args, kwargs = self.take((fn.args, fn.keywords))

            def partial(nodes: Any) -> Any:
                filled, named = _fill((args, kwargs), nodes)
                return functools.partial(inner(nodes), *filled, **named)

            return partial
        if inspect.isfunction(fn):
            return self._take_from_closure(fn)
        return lambda nodes: fn

    def _take_from_closure(self, fn: types.FunctionType) -> Callable[[Any], Any]:
        before = len(self.taken)
        cells = [self.take(cell.cell_contents) for cell in fn.__closure__ or ()]
        names = [name for name in fn.__code__.co_names if _holds_node(fn.__globals__.get(name))]
        used = {name: self.take(fn.__globals__[name]) for name in names}
        if len(self.taken) == before:
            return lambda nodes: fn

        def closure(nodes: Any) -> Any:
            made = types.FunctionType(
                fn.__code__,
                {**fn.__globals__, **_fill(used, nodes)},
                fn.__name__,
                fn.__defaults__,
                tuple(types.CellType(_fill(cell, nodes)) for cell in cells),
            )
            made.__kwdefaults__ = fn.__kwdefaults__
            return made

        return closure


def _holds_node(value: Any) -> bool:
    return _is_node(value) or (
        type(value) in (list, tuple, dict)
        and any(map(_is_node, value.values() if type(value) is dict else value))
    )


def _fill(tree: Any, nodes: Any) -> Any:
    """The structure with objects in the place of its slots."""
    is_slot = lambda x: type(x) is _Slot  # noqa: E731
    return jax.tree.map(lambda x: nodes[x.number] if is_slot(x) else x, tree, is_leaf=is_slot)


def _variable_type(kind: Any) -> Any:
    return nnx.variable_type_from_name(kind, allow_register=True) if isinstance(kind, str) else kind


def _sow(adapter: NNX, original: Any) -> Any:
    signature = inspect.signature(original)
    defaults = {name: signature.parameters[name].default for name in ("reduce_fn", "init_fn")}

    @functools.wraps(original)
    def sow(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if marking() is None:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        reduce, init = given["reduce_fn"], given["init_fn"]
        fold = {"reduce": reduce, "init": init}
        if reduce is defaults["reduce_fn"] and init is defaults["init_fn"]:
            fold = {}
        with within(adapter, self):
            kind = _variable_type(given["variable_type"])
            mark(given["value"], given["name"], "sow", collection=kind, **fold)
        return original(self, *args, **kwargs) if _capturing(self) else True

    return sow


def _perturb(adapter: NNX, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def perturb(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if marking() is None:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        value, name = given["value"], given["name"]
        if _capturing(self) or hasattr(self, name):
            value = original(self, *args, **kwargs)
        with within(adapter, self):
            kind = _variable_type(given["variable_type"])
            return mark(value, name, "perturb", collection=kind)

    return perturb


def _capturing(module: Any) -> bool:
    """Whether `nnx.capture` is at work on a module."""
    return hasattr(module, "__captures__")


ADAPTER = NNX()
