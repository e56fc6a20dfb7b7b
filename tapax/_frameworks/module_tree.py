"""The contents of a model: its modules, their paths and their arrays."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from tapax._frameworks.anchors import leaf_path
from tapax._frameworks.interface import Adapter, Module
from tapax._jax import PyTree
from tapax._sites import join, segment

CONTAINERS = (list, tuple, dict)


def kind(adapter: Adapter, module: Module) -> Any:
    """Return the classes in a module, which are equal for a module and its copy."""
    parts = ((path, type(part)) for path, part in descendants(adapter, module))
    return type(module), frozenset(parts)


def index(adapter: Adapter, module: Module) -> dict[int, str]:
    """Return the paths of a module and of all modules and wrappers in it, by id."""
    found = {id(module): ""}
    for path, part in _nodes(adapter, module):
        found.setdefault(id(part), path)
    return found


def descendants(adapter: Adapter, module: Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules in a module with their paths, the nearest first, each once."""
    return (found for found in _nodes(adapter, module) if adapter.is_module(found[1]))


def _nodes(adapter: Adapter, module: Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules and wrappers in a module with their paths, the nearest first."""
    seen = {id(module)}
    level = [("", module)]
    while level:
        deeper = []
        for path, value in level:
            for name, child in _parts(adapter, value):
                if id(child) in seen:
                    continue
                seen.add(id(child))
                below = join(path, name), child
                deeper.append(below)
                if adapter.is_module(child) or adapter.wraps(child):
                    yield below
        level = deeper


def in_order(adapter: Adapter, model: Module) -> Iterator[tuple[str, Any]]:
    """Yield a module and all modules in it, each once, in the order of their attributes."""
    paths = index(adapter, model)

    def below(path: str, value: PyTree, around: frozenset[int]) -> Iterator[tuple[str, Any]]:
        if id(value) in around:  # an object that contains itself
            return
        if adapter.is_module(value):
            if paths.get(id(value)) != path:
                return
            yield path, value
        for name, part in _parts(adapter, value):
            yield from below(join(path, name), part, around | {id(value)})

    return below("", model, frozenset())


def _parts(adapter: Adapter, value: PyTree) -> Iterator[tuple[str, Any]]:
    if adapter.is_module(value) or adapter.wraps(value):
        parts = adapter.children(value)
    elif isinstance(value, dict):
        parts = ((segment(key), part) for key, part in value.items())
    elif isinstance(value, CONTAINERS):
        parts = ((str(i), part) for i, part in enumerate(value))
    else:
        parts = _attributes(value)
    for name, part in parts:
        if adapter.is_module(part) or adapter.wraps(part) or _is_container(adapter, part):
            yield name, part


def _is_container(adapter: Adapter, value: PyTree) -> bool:
    """Return whether a value that is not a module may contain modules."""
    if isinstance(value, CONTAINERS) or hasattr(type(value), "__dataclass_fields__"):
        return True
    return isinstance(value, adapter.container_types)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, also of a dataclass with slots."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = dict.fromkeys([*(field.name for field in fields), *getattr(value, "__dict__", ())])
    return ((segment(name), getattr(value, name)) for name in names if hasattr(value, name))


def arrays(adapter: Adapter, module: Module) -> Iterator[tuple[str, Any]]:
    """Yield the arrays in a module, and their paths."""
    for keys, x in jax.tree_util.tree_leaves_with_path(adapter.state(module)):
        if isinstance(x, jax.Array):
            yield leaf_path(keys), x


def is_slice(adapter: Adapter, module: Module, stack: Module) -> bool:
    """Return whether the arrays of a module have the shapes of `stack` without the first axis.

    That is so in the body of a loop over modules that are stacked in one.
    """
    shapes, stacked = (
        {path: x.shape for path, x in arrays(adapter, part)} for part in (module, stack)
    )
    return (
        bool(shapes)
        and shapes == {path: shape[1:] for path, shape in stacked.items()}
        and all(stacked.values())
    )
