"""The order of the attributes of objects, which NNX sorts when it merges objects.

A model may iterate over its parts in the order of their assignment: the keys of an `nnx.Dict` are
attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AttributeOrder:
    """The names of the attributes of some objects and of all objects inside, in order."""

    names: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, objects: Sequence[Any]) -> AttributeOrder:
        return cls(tuple(tuple(vars(x)) for x in _nodes(objects)))

    def restore(self, objects: Sequence[Any]) -> None:
        """Reorder the attributes of `objects`, which have the same structure, to this order."""
        for node, names in zip(_nodes(objects), self.names, strict=True):
            _reorder(vars(node), names)


class OuterOrder:
    """The order of the attributes of objects that may get more attributes."""

    def __init__(self, objects: Sequence[Any]):
        self._names = [(x, tuple(vars(x))) for x in _nodes(objects)]

    def restore(self) -> None:
        """Restore the order of the attributes; new attributes come last."""
        for node, names in self._names:
            _reorder(vars(node), names)


def _nodes(objects: Sequence[Any]) -> list[Any]:
    """List the objects with attributes in a structure, each once, in an order that NNX keeps."""
    found: dict[int, Any] = {}
    pending: list[Any] = [objects]
    while pending:
        value = pending.pop()
        kind = type(value)
        if issubclass(kind, (list, tuple)):
            pending += value
        elif issubclass(kind, dict):
            pending += [value[key] for key in sorted(value, key=str)]
        elif issubclass(kind, nnx.Pytree) and id(value) not in found:
            found[id(value)] = value
            held = vars(value)
            pending += [held[name] for name in sorted(held)]
    return list(found.values())


def _reorder(attributes: dict[str, Any], names: Sequence[str]) -> None:
    if all(a == b for a, b in zip(attributes, names, strict=False)):
        return
    first = {name: attributes[name] for name in names if name in attributes}
    rest = {name: value for name, value in attributes.items() if name not in first}
    attributes.clear()
    attributes.update(first | rest)
