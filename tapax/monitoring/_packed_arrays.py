"""Arrays packed into one for each dtype, because each array that a program returns costs time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._jax import PyTree, Value


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """The arrays of a structure in each packed array, by their indices, and their shapes."""

    treedef: Any
    places: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]

    def unpack(self, packed: Sequence[np.ndarray]) -> Any:
        """Rebuild the structure from packed NumPy arrays."""
        arrays: list[Any] = [None] * len(self.shapes)
        for places, flat in zip(self.places, packed, strict=True):
            start = 0
            for place in places:
                end = start + math.prod(self.shapes[place])
                arrays[place] = flat.reshape(-1)[start:end].reshape(self.shapes[place])
                start = end
        return self.treedef.unflatten(arrays)


@jax.tree_util.register_pytree_node_class
class PackedArrays:
    """The arrays of a structure, packed into one for each dtype.

    An array that is sharded over an explicit mesh is not packed.
    """

    def __init__(self, packed: Iterable[Value], layout: ArrayLayout):
        self.packed, self.layout = tuple(packed), layout

    @classmethod
    def of(cls, tree: PyTree) -> PackedArrays:
        """Pack the arrays of a structure."""
        leaves, treedef = jax.tree.flatten(tree)
        groups: dict[Any, list[int]] = {}
        for i, x in enumerate(leaves):
            groups.setdefault((x.dtype, i if _is_divided(x) else None), []).append(i)
        packed = [
            leaves[places[0]]
            if len(places) == 1
            else jnp.concatenate([leaves[i].reshape(-1) for i in places])
            for places in groups.values()
        ]
        shapes = tuple(tuple(x.shape) for x in leaves)
        return cls(packed, ArrayLayout(treedef, tuple(map(tuple, groups.values())), shapes))

    def fetch(self) -> Any:
        """Wait for the arrays, and return the structure with NumPy arrays."""
        return self.layout.unpack(jax.device_get(self.packed))

    def tree_flatten(self) -> tuple[Any, Any]:
        return self.packed, self.layout

    @classmethod
    def tree_unflatten(cls, layout: ArrayLayout, packed: Iterable[Value]) -> PackedArrays:
        return cls(packed, layout)


def _is_divided(x: Value) -> bool:
    return any(part is not None for part in jax.typeof(x).sharding.spec)
