"""The contents of a model: its modules, their paths and their arrays."""

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

    def below(path: str, value: PyTree) -> Iterator[tuple[str, Any]]:
        if adapter.is_module(value):
            if paths.get(id(value)) != path:
                return
            yield path, value
        for name, part in _parts(adapter, value):
            yield from below(join(path, name), part)

    return below("", model)


def _parts(adapter: Adapter, value: PyTree) -> Iterator[tuple[str, Any]]:
    if adapter.is_module(value) or adapter.wraps(value):
        parts = adapter.children(value)
    elif isinstance(value, dict):
        parts = ((segment(key), part) for key, part in value.items())
    else:
        parts = ((str(i), part) for i, part in enumerate(value))
    for name, part in parts:
        if adapter.is_module(part) or adapter.wraps(part) or isinstance(part, CONTAINERS):
            yield name, part


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
