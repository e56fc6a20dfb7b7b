"""The values that a function reads from outside of its arguments, and whether they were replaced.

A compiled program contains the closed-over values with which its function was traced. A plain call
of the function would read the current ones. So a program remembers where the function found them:
in variables, and for the arrays in the program also in containers and attributes.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from tapax import _jax
from tapax._frameworks.users_code import closure_values, is_users_code
from tapax._marks.fingerprints import fingerprint
from tapax.reduce import Reducer

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_ARRAYS = (jax.Array, np.ndarray, np.generic)
_MANY = 20_000
"""The most values that a search visits."""


class _Reading(NamedTuple):
    """A value, the place where it was found, and the variable that leads there."""

    variable: str
    read: Callable[[], Any]
    value: Any

    @property
    def has_changed(self) -> bool:
        now = self.read()
        return now is not self.value and not _is_equal(now, self.value)


class FreeVariables(NamedTuple):
    """The values that a function has read from outside, as far as a replacement can be noticed.

    It is `complete` unless the function may also read the parts of an object or a container.
    """

    readings: tuple[_Reading, ...] = ()
    complete: bool = True

    @classmethod
    def of(cls, fn: Any, constants: Iterable[Any] = ()) -> FreeVariables:
        """Find the values of the variables of a function, and its `constants`.

        `fn` may also be a value of tapax that contains functions.
        """
        complete = True
        wanted = {id(x) for x in constants if isinstance(x, jax.Array)}
        found: dict[int, list[_Reading]] = {id(fn): []}
        kept: dict[tuple[int, Any], _Reading] = {}
        methods = _Methods()
        pending = deque([fn])
        while pending and len(found) < _MANY:
            holder = pending.popleft()
            path = found[id(holder)]
            complete = complete and not _may_change_inside(holder)
            for method in methods.found_with(holder):
                if id(method) not in found:
                    found[id(method)] = path
                    pending.append(method)
            for place in _places(holder):
                value = place.value
                here = place.reading(path)
                if place.is_variable:
                    kept[id(holder), place.key] = here[-1]
                if id(value) in wanted:
                    kept |= {(id(reading.read), None): reading for reading in here}
                if id(value) not in found and not _is(value, *_NUMBERS, *_ARRAYS):
                    found[id(value)] = here
                    pending.append(value)
        return cls(tuple(kept.values()), complete and len(found) < _MANY)

    def find_changed(self) -> str | None:
        """Return a variable that leads to another value now; None if all values are the same."""
        return next((r.variable for r in self.readings if r.has_changed), None)


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two values of a variable give equal programs, as far as can be told."""
    if type(a) is not type(b) or _is(a, *_ARRAYS):
        return False
    if type(a) in _NUMBERS:
        return bool(a == b)
    try:
        return fingerprint(a) == fingerprint(b)
    except RecursionError:
        return False


class _Methods:
    """The methods of the classes of a search, as far as a function of the search may call them.

    A function may call those whose names occur in its code, and `__call__`.
    """

    def __init__(self) -> None:
        self._classes: dict[type, None] = {}
        self._names = {"__call__": None}

    def found_with(self, holder: Any) -> list[types.FunctionType]:
        """Return the methods that the search may reach, now that it has reached `holder`."""
        classes, names = self._classes, self._names
        if inspect.isfunction(holder):
            names = dict.fromkeys(n for n in _names(holder.__code__) if n not in self._names)
            self._names |= names
        elif not _is_left_out(holder) and holder.__class__ not in self._classes:
            bases = holder.__class__.__mro__
            classes = dict.fromkeys(base for base in bases if is_users_code(base.__module__))
            self._classes |= classes
        else:
            return []
        found = (_function_of(vars(cls).get(name)) for cls in classes for name in names)
        return [method for method in found if inspect.isfunction(method)]


def _function_of(member: Any) -> Any:
    """Return the function of a property or of another member of a class."""
    if _is(member, property):
        return member.fget
    if _is(member, functools.cached_property):
        return member.func
    return member.__func__ if _is(member, staticmethod, classmethod) else member


class _Place(NamedTuple):
    """A place in a function, a container or an object; `read` is None if it never changes."""

    key: Any
    value: Any
    read: Callable[[], Any] | None = None
    is_variable: bool = False

    def reading(self, path: list[_Reading]) -> list[_Reading]:
        """Return the readings that lead to the value, given those that lead to its holder."""
        if self.read is None:
            return path
        variable = path[0].variable if path else str(self.key)
        return [*path, _Reading(variable, self.read, self.value)]


def _places(holder: Any) -> Iterator[_Place]:
    """Yield the places of a value at which other values may be replaced."""
    if inspect.isfunction(holder):
        yield from _variables(holder)
    elif inspect.ismethod(holder):
        yield from (_Place("self", holder.__self__), _Place("", holder.__func__))
    elif _is(holder, functools.partial):
        yield from map(functools.partial(_Place, ""), (holder.func, *holder.args))
        yield from _items(holder.keywords)
    elif _is(holder, dict):
        yield from _items(holder)
    elif _is(holder, list):
        for i, value in enumerate(holder):
            yield _Place(i, value, functools.partial(_item, holder, i))
    elif _is(holder, tuple, set, frozenset):
        yield from (_Place("", value) for value in holder)
    elif not _is_left_out(holder):
        yield from _items(getattr(holder, "__dict__", {}))
        for name in _slots(holder.__class__):
            read = functools.partial(getattr, holder, name, None)
            yield _Place(name, read(), read)


@functools.lru_cache(maxsize=4096)
def _slots(cls: type) -> tuple[str, ...]:
    """Return the names of the attributes that a class keeps in slots."""
    named = (vars(base).get("__slots__", ()) for base in cls.__mro__)
    slots = (name for names in named for name in ([names] if isinstance(names, str) else names))
    return tuple(name for name in slots if not name.startswith("__"))


def _is_left_out(value: Any) -> bool:
    """Return whether a search skips the attributes of a value.

    A jitted function in the function keeps its values in a plain call too, and the reducers of
    tapax never change.
    """
    return (
        _is(value, type, types.ModuleType)
        or (_is(value, Reducer) and value.is_builtin)
        or inspect.isroutine(value)
        or _jax.jit_options(value) is not None
    )


def _may_change_inside(holder: Any) -> bool:
    """Return whether parts of a value may be replaced that are not variables of functions."""
    if inspect.isfunction(holder) or inspect.ismethod(holder) or _is_left_out(holder):
        return False
    if _is(holder, functools.partial, tuple, frozenset, slice, range, np.dtype, type(...)):
        return False
    return not type(holder).__module__.startswith(__name__.partition(".")[0] + ".")


def _is(value: Any, *kinds: type) -> bool:
    """Return whether a value has one of these types; its parts may be anything."""
    return isinstance(value, kinds)


def _items(holder: dict[Any, Any]) -> Iterator[_Place]:
    for key, value in list(holder.items()):
        yield _Place(key, value, functools.partial(holder.get, key))


def _item(holder: list[Any], i: int) -> Any:
    return holder[i] if i < len(holder) else None


def _variables(fn: types.FunctionType) -> Iterator[_Place]:
    """Yield the variables of a function: the closed-over ones, and the globals that it uses.

    The numbers that the function changes itself, such as a counter of its traces, are not read.
    """
    code = fn.__code__
    stored = _stored_names(code)
    cells = zip(code.co_freevars, fn.__closure__ or (), closure_values(fn), strict=True)
    for name, cell, value in cells:
        read = functools.partial(_contents, cell)
        yield _Place(name, value, read, name not in stored)
    if is_users_code(fn.__module__):
        for name in _names(code):
            if name in fn.__globals__:
                read = functools.partial(fn.__globals__.get, name)
                yield _Place(name, fn.__globals__[name], read, name not in stored)
    yield _Place("", getattr(fn, "__wrapped__", None))


def _contents(cell: types.CellType) -> Any:
    return None if cell == types.CellType() else cell.cell_contents


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals and attributes whose names a function, or a function in it, mentions."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *(n for c in inner for n in _names(c))]))


@functools.lru_cache(maxsize=4096)
def _stored_names(code: types.CodeType) -> frozenset[str]:
    """Return the closed-over and global variables that a function or a function in it sets."""
    set_here = {i.argval for i in dis.get_instructions(code) if i.opname in _STORES}
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(set_here).union(*map(_stored_names, inner))


_STORES = ("STORE_GLOBAL", "STORE_DEREF")
