"""Fingerprints: the behaviour of a function or configuration as a comparable value.

A lambda is a new object each time it is evaluated, and a set that a filter closes over may have
other elements at the next call. So neither identity nor equality tells whether a program traced
with them can be reused. A fingerprint records their contents at the moment it is taken.

>>> wanted = {"a"}
>>> before = fingerprint(lambda name: name in wanted)
>>> before == fingerprint(lambda name: name in wanted)
True
>>> wanted.add("b")
>>> before == fingerprint(lambda name: name in wanted)
False
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np

from tapax._jax import Value

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_CONTAINERS = (tuple, list, set, frozenset)


@dataclasses.dataclass(frozen=True, eq=False)
class _Identity:
    """A reference that compares by identity, and keeps its object alive so the id stays unique."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(value: Value, attributes: Callable[[Any], Any] = vars) -> Hashable:
    """Return the contents of a value; parts that cannot be compared count by identity.

    `attributes` returns the attributes of an object that has a `__dict__`.
    """
    return _Fingerprints(attributes).of(value)


class _Fingerprints:
    """A cache of the fingerprints of the parts of a value."""

    def __init__(self, attributes: Callable[[Any], Any]):
        self._attributes = attributes
        self._known: dict[int, tuple[Any, Hashable]] = {}

    def of(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), repr(value)
        if id(value) not in self._known:
            # In a cyclic value, the inner reference counts by the order of the traversal.
            self._known[id(value)] = value, len(self._known)
            self._known[id(value)] = value, (type(value), self._content(value))
        return self._known[id(value)][1]

    def _content(self, value: Any) -> Hashable:
        if issubclass(type(value), _CONTAINERS):
            parts = map(self.of, value)
            return tuple(parts) if issubclass(type(value), (tuple, list)) else frozenset(parts)
        if issubclass(type(value), Mapping):
            return tuple((self.of(key), self.of(item)) for key, item in value.items())
        if isinstance(value, functools.partial):
            return self.of((value.func, value.args, value.keywords))
        if isinstance(value, types.MethodType):
            return self.of((value.__func__, value.__self__))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return value.co_code, value.co_names, self.of(value.co_consts)
        if type(value) is np.ndarray and value.dtype != object:
            return value.dtype, value.shape, value.tobytes()
        fixed = isinstance(value, (type, types.ModuleType, jax.Array))
        if fixed or not hasattr(value, "__dict__"):
            return _Identity(value)
        content = self.of(dict(self._attributes(value)))
        return content if dataclasses.is_dataclass(value) else (_Identity(value), content)

    def _function(self, function: types.FunctionType) -> Hashable:
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        read = (name for name in function.__code__.co_names if name in function.__globals__)
        others = {name: function.__globals__[name] for name in read}
        # Global functions count by identity, not by their contents.
        used = {k: _Identity(v) if callable(v) else self.of(v) for k, v in others.items()}
        bound = cells, function.__defaults__, function.__kwdefaults__
        return self.of(function.__code__), self.of(bound), tuple(used.items())


def _contents(cell: types.CellType) -> Any:
    return None if cell == types.CellType() else cell.cell_contents
