"""The arrays among the arguments of a step by name, and the arrays that replace them.

A name consists of the name of the argument and the path of the array in it:
`state/params/Dense_0/kernel`, `model/blocks/0/mlp/kernel`. `name_models` finds the names that the
sites of a module have: `Net/blocks/0/mlp`.

Models that the step closes over, or of which the step is a method, count as arguments.

A step changes objects in place, or returns new arrays. The new value of an argument is the part of
the result with the structure, shapes and dtypes of the argument. If the result has no such part,
the smallest part of the argument that contains all parameters takes the place of the argument.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tapax._frameworks import registry
from tapax._frameworks.closures import closed_over_modules
from tapax._frameworks.interface import Adapter, key_path
from tapax._frameworks.roots import Root, Roots
from tapax._frameworks.users_code import find_signature
from tapax._jax import Args, Kwargs, PyTree
from tapax._sites import join


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a step; `roots` maps the `id` of each module in it to the module's path."""

    name: str
    value: Any
    roots: Mapping[int, str]

    def arrays(self) -> dict[str, Any]:
        """Return the current arrays in the argument, by name."""
        leaves = jax.tree_util.tree_flatten_with_path(self.value, is_leaf=_is_object)[0]
        found: dict[str, Any] = {}
        for keys, leaf in leaves:
            if _is_object(leaf):
                root = self.roots[id(leaf)]
                found.update((join(root, path), x) for path, x in _object_arrays(leaf))
            elif _is_array(leaf):
                found[join(self.name, key_path(keys))] = leaf
        return found


def list_arguments(step: Callable[..., Any], args: Args, kwargs: Kwargs) -> list[Argument]:
    """List the arguments of a call by name, and the models that the step closes over."""
    given = list(_bound(step, args, kwargs))
    roots: dict[int, str] = {}
    for name, value in given:
        for path, module in _objects_in(value):
            roots.setdefault(id(module), join(name, path))
    closed_over = closed_over_modules(step, registry.loaded_adapters())
    closed_over = [(name, module) for name, module in closed_over if id(module) not in roots]
    roots |= {id(module): name for name, module in closed_over}
    return [Argument(name, value, roots) for name, value in (*given, *closed_over)]


def name_models(arguments: Iterable[Argument], parameters: Collection[str]) -> dict[str, str]:
    """Map the path of each module with parameters to the name that its sites have.

    The name is that of its class, or that of its variable if several of them have one class. A
    module without parameters, such as the moments that an optimizer keeps, changes no name.
    """
    found: list[Root] = []
    for argument in arguments:
        for _, module in _objects_in(argument.value):
            path = argument.roots[id(module)]
            if any(name.startswith(f"{path}/") for name in parameters):
                found.append(Root(_class_name(module), path, (path,)))
    roots = Roots()
    for root in found:
        roots.add(root)
    roots.settle()
    return {root.holders[0]: roots.name(root) for root in found}


def _bound(step: Callable[..., Any], args: Args, kwargs: Kwargs) -> Iterator[tuple[str, Any]]:
    try:
        signature = find_signature(step)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        yield from ((f"arg{i}", value) for i, value in enumerate(args))
        yield from kwargs.items()
        return
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((f"{name}/{i}", part) for i, part in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def find_replaced(arguments: Iterable[Argument], before: Mapping[str, Any]) -> dict[str, Any]:
    """Find the arrays that a call replaced in its arguments; `before` has those from before."""
    now = {name: x for argument in arguments for name, x in argument.arrays().items()}
    return {name: x for name, x in now.items() if name in before and x is not before[name]}


def find_updated(
    arguments: Iterable[Argument],
    replaced: Mapping[str, Any],
    result: PyTree,
    before: Mapping[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """Find the parameters after a call, and the names of the arguments without known parameters.

    `replaced` has the arrays that the call replaced in its arguments; `before` maps names to the
    parameters before the call. The arrays of `result` may be `jax.ShapeDtypeStruct`s.
    """
    after: dict[str, Any] = {}
    unknown: list[str] = []
    for argument in arguments:
        names = frozenset(argument.arrays()) & before.keys()
        if not names:
            continue
        if not names.isdisjoint(replaced):
            after.update((name, replaced.get(name, before[name])) for name in names)
            continue
        found = _returned(argument, names, result)
        if found is None:
            unknown.append(argument.name)
        else:
            after.update(found)
    return after, unknown


def _returned(argument: Argument, names: frozenset[str], result: PyTree) -> dict[str, Any] | None:
    """Find the parameters of an argument in a result; return None if their place is unclear."""
    parts = [(argument.name, argument.value)]
    while parts:
        prefix, part = parts[0]
        part_argument = Argument(prefix, part, argument.roots)
        if not names <= part_argument.arrays().keys():
            return None
        matching = _shallowest(result, _signature(part))
        if len(matching) == 1:
            twin = dataclasses.replace(
                part_argument, value=matching[0], roots=_twin_roots(part_argument, matching[0])
            )
            return {name: x for name, x in twin.arrays().items() if name in names}
        if matching:
            return None
        parts = [
            child
            for child in _children(prefix, part)
            if names <= Argument(*child, argument.roots).arrays().keys()
        ]
    return None


def _children(prefix: str, part: PyTree) -> Iterator[tuple[str, Any]]:
    if _is_object(part):
        return
    leaves = jax.tree_util.tree_flatten_with_path(part, is_leaf=lambda x: x is not part)[0]
    for keys, child in leaves:
        if child is not part:
            yield join(prefix, key_path(keys)), child


def _twin_roots(argument: Argument, twin: PyTree) -> dict[int, str]:
    """Name the modules in the twin of an argument, by their `id`."""
    pairs = zip(_objects_in(argument.value), _objects_in(twin), strict=True)
    return {id(new): argument.roots[id(old)] for (_, old), (_, new) in pairs}


def _signature(tree: PyTree) -> tuple[Any, ...]:
    """Return the structure of a tree, and the shapes and dtypes of its arrays."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype) if _is_array(x) else None for x in leaves)


def _shallowest(tree: PyTree, signature: tuple[Any, ...]) -> list[Any]:
    """Find the parts of a tree with this signature that are nearest to its root."""
    level = [tree]
    while level:
        found = [part for part in level if _signature(part) == signature]
        if found:
            return found
        level = [child for part in level for _, child in _children("", part)]
    return []


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _adapter(value: Any) -> Adapter | None:
    found = (a for a in registry.loaded_adapters() if a.is_module(value) or a.is_opaque(value))
    return next(found, None)


def _is_object(value: Any) -> bool:
    return not _is_array(value) and _adapter(value) is not None


def _objects_in(value: PyTree) -> list[tuple[str, Any]]:
    """List the modules in a structure, each with its path."""
    leaves = jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_object)[0]
    return [(key_path(keys), leaf) for keys, leaf in leaves if _is_object(leaf)]


def _class_name(value: Any) -> str:
    adapter = _adapter(value)
    assert adapter is not None
    return adapter.name(value) if adapter.is_module(value) else type(value).__name__


def _object_arrays(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the arrays of an object of a framework, each with its path in the object."""
    adapter = _adapter(value)
    assert adapter is not None
    return ((path, x) for path, x in adapter.named_arrays(value) if _is_array(x))
