"""The state of the objects that a call has taken, as one node of a pytree.

`nnx.split` makes a node for every variable and every module. JAX would flatten all of these nodes
at every call, and more than once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.tree_util import DictKey

from tapax._frameworks.anchors import PathKey, leaf_path
from tapax._jax import Value
from tapax._sites import join


@jax.tree_util.register_pytree_with_keys_class
class TakenState:
    """The arrays of some objects, and the structure from which NNX makes the objects.

    `named` has the objects by path. They are known until JAX flattens the node, and their paths
    are the keys of the arrays.
    """

    def __init__(
        self,
        arrays: Iterable[Value],
        graphdef: Any,
        structure: Any,
        named: Mapping[PathKey, Any] | None = None,
    ):
        self._arrays = tuple(arrays)
        self._graphdef, self._structure, self._named = graphdef, structure, named

    @classmethod
    def of(cls, named: Mapping[PathKey, Any], context: Any) -> TakenState:
        """Split objects into arrays in a context of NNX."""
        graphdef, values = context.flatten(named, with_paths=False)
        arrays, structure = jax.tree.flatten(values)
        return cls(arrays, graphdef, structure, named)

    def merge(self, context: Any) -> dict[PathKey, Any]:
        """Make objects from the arrays in a context of NNX."""
        return context.unflatten(self._graphdef, self._structure.unflatten(self._arrays))

    def tree_flatten(self) -> tuple[Any, Any]:
        return self._arrays, (self._graphdef, self._structure)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        assert self._named is not None, "The objects are forgotten when they are taken apart."
        flat = flatten_objects(self._named)
        paths = [
            [*map(DictKey, path), *keys]
            for path, value in flat
            for keys, _ in jax.tree.leaves_with_path(value)
        ]
        keys = [
            DictKey(PathKey(leaf_path(path), join(path[0].key.named, leaf_path(path[1:]))))
            for path in paths
        ]
        return list(zip(keys, self._arrays, strict=True)), (self._graphdef, self._structure)

    @classmethod
    def tree_unflatten(cls, structure: Any, arrays: Iterable[Value]) -> TakenState:
        return cls(arrays, *structure)


def flatten_objects(objects: Any) -> Any:
    """List the variables and arrays of objects, each once, with their paths."""
    with nnx.split_context() as context:
        return context.flatten(objects)[1]
