"""Small states of reducers, packed into few arrays where a scan stacks them.

A scan on a GPU runs a kernel in each iteration for every array that it stacks. A hundred sites have
hundreds of statistics; packed, they are one array for each dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax import _jax
from tapax._jax import Value

_SMALL = 4096
"""The most elements of an array that `pack` packs."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of packed arrays, concatenated along the last axis for each dtype."""

    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]

    def unpack(self, arrays: Sequence[Value]) -> list[Any]:
        """Return the arrays from before `pack`, with the first axis that a loop has added."""
        packed, rest = arrays[: len(self.groups)], iter(arrays[len(self.groups) :])
        found = dict(self._parts(packed))
        return [found[i] if i in found else next(rest) for i in range(len(self.shapes))]

    def _parts(self, packed: Sequence[Value]) -> Iterator[tuple[int, Any]]:
        for array, group in zip(packed, self.groups, strict=True):
            start = 0
            for i in group:
                end = start + math.prod(self.shapes[i])
                yield i, array[:, start:end].reshape(array.shape[0], *self.shapes[i])
                start = end


def pack(arrays: Sequence[Value], states: set[int]) -> tuple[list[Any], Packing]:
    """Pack the small arrays whose ids are in `states`; the packed arrays come first."""
    by_type: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        if id(array) in states and array.size <= _SMALL and _is_anywhere(array):
            by_type.setdefault(array.dtype, []).append(i)
    groups = tuple(tuple(group) for group in by_type.values() if len(group) > 1)
    together = {i for group in groups for i in group}
    packed = [jnp.concatenate([arrays[i].ravel() for i in group]) for group in groups]
    rest = [array for i, array in enumerate(arrays) if i not in together]
    return [*packed, *rest], Packing(tuple(map(np.shape, arrays)), groups)


def _is_anywhere(array: Value) -> bool:
    """Return whether an array is equal on all devices of a mesh, as far as its type tells."""
    aval = jax.typeof(array)
    return not _jax.varying_axes(aval) and not any(aval.sharding.spec)
