"""Values that contain objects of NNX and are not such objects: functions, trainers, containers.

These functions find the parts of such a value, the attributes that are state, and the names that
its code uses and assigns.
"""

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from tapax import _jax
from tapax._frameworks.users_code import closure_values
from tapax._jax import PyTree, Value
from tapax._marks.sow import is_array

TRANSFORMED = tuple({type(nnx.jit(lambda: None, graph=graph)) for graph in (True, False)})


def is_object(value: PyTree) -> bool:
    """Return whether a value is an object of NNX, which has state or may contain some."""
    # The instance checks of NNX are slow, and an argument may have very many leaves. But only
    # instances tell whether tracers and Hijax variables are variables.
    return not _is_other_class(type(value)) and isinstance(value, (nnx.Pytree, nnx.Variable))


@functools.lru_cache(maxsize=4096)
def _is_other_class(cls: type) -> bool:
    """Return whether no instance of a class is an object of NNX."""
    return not issubclass(cls, (nnx.Pytree, nnx.Variable, nnx.variablelib.HijaxVariable, Tracer))


_DEPTH = 4
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, np.ndarray})


def holds_object(value: PyTree) -> bool:
    """Return whether a value contains an object of NNX, within a few levels."""
    level, seen = [value], {id(value): value}
    for _ in range(_DEPTH):
        if any(map(is_object, level)):
            return True
        # A model may contain very many plain values, and the other tests are slow.
        parts = (x for held in level for x in _parts(held) if type(x) not in _PLAIN)
        new = {id(x): x for x in parts if id(x) not in seen}
        seen |= new
        level = list(new.values())
    return any(map(is_object, level))


def _parts(value: PyTree) -> list[Any]:
    """Return the direct parts of a value."""
    if is_plain(value):
        return []
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if inspect.ismethod(value):
        return [value.__self__]
    if inspect.isfunction(value):
        return closure_values(value)
    return list(attributes(value).values()) if has_attributes(value) else []


def is_plain(value: PyTree) -> bool:
    """Return whether a value cannot contain an object."""
    # The instance check of `jax.Array`, which tracers need, is slow.
    return _is_plain_class(type(value)) or isinstance(value, jax.Array)


@functools.lru_cache(maxsize=4096)
def _is_plain_class(cls: type) -> bool:
    return cls in _PLAIN or issubclass(cls, (jax.Array, np.ndarray, np.generic))


def has_attributes(value: PyTree) -> bool:
    """Return whether a copy with other attributes can replace a value."""
    # NNX compares its transformations by identity.
    kept = (type, types.ModuleType, *TRANSFORMED)
    if isinstance(value, kept) or inspect.isroutine(value) or not attributes(value):
        return False
    try:
        object.__new__(type(value))
    except TypeError:  # the value is more than its attributes, like a dict
        return False
    return True


def attributes(value: PyTree) -> dict[str, Any]:
    slots = (name for cls in type(value).__mro__ for name in _slots(cls))
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


@functools.lru_cache(maxsize=4096)
def _slots(cls: type) -> tuple[str, ...]:
    names = cls.__dict__.get("__slots__", ())
    return tuple(n for n in ((names,) if isinstance(names, str) else names) if n[:2] != "__")


def set_attributes(value: PyTree, new: dict[str, Any]) -> None:
    """Set attributes, even of frozen objects."""
    for name, attribute in new.items():
        object.__setattr__(value, name, attribute)


def is_state(attribute: Any, changes: bool) -> bool:
    """Return whether an attribute is state: arrays, or a plain value that changes."""
    if attribute is None or type(attribute) in (bool, int, float, complex, str):
        return changes
    leaves = _leaves(attribute)
    if not leaves:  # code may put arrays into it
        return leaves is not None and type(attribute) in (list, dict)
    # A traced value is a remnant of a finished transformation.
    return all(isinstance(x, jax.Array) and not isinstance(x, Tracer) for x in leaves)


def is_result(value: PyTree) -> bool:
    """Return whether the function that is being traced can return a value."""
    leaves = _leaves(value)
    return leaves is not None and all(map(_is_returned, leaves))


def _is_returned(leaf: PyTree) -> bool:
    if isinstance(leaf, Tracer):
        return _jax.is_traced_here(leaf)
    return is_object(leaf) or is_array(leaf) or isinstance(leaf, (str, bytes))


def is_number(value: PyTree) -> bool:
    """Return whether an array represents a Python number."""
    return isinstance(value, jax.Array) and value.ndim == 0 and jax.typeof(value).weak_type


def _leaves(value: PyTree) -> list[Any] | None:
    try:
        return jax.tree.leaves(value, is_leaf=is_object)
    except (TypeError, ValueError):  # a dict whose keys have no order
        return None


def identity(value: PyTree) -> Any:
    """Return an object that differs once a part of a container differs; None if unknown."""
    leaves = _leaves(value)
    if leaves is None:
        return None
    return jax.tree.structure(value, is_leaf=is_object), [id(leaf) for leaf in leaves]


def refilled(old: Value, new: Value) -> Any:
    """Fill the old containers with the contents of the new containers."""
    if type(old) is not type(new) or type(old) not in (list, dict):
        return new
    if type(old) is dict:
        parts: Any = {key: refilled(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(parts)
    else:
        pairs = itertools.zip_longest(old[: len(new)], new)
        old[:] = [refilled(*pair) for pair in pairs]
    return old


_MAKERS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})


@functools.lru_cache(maxsize=4096)
def assigned_by_methods(cls: type) -> frozenset[str]:
    """Return the attributes that the methods of a class assign, except its constructors."""
    found = (m for c in cls.__mro__ for name, m in vars(c).items() if name not in _MAKERS)
    functions = filter(inspect.isfunction, map(inspect.unwrap, filter(callable, found)))
    return frozenset(name for fn in functions for name in _stores(fn.__code__, "STORE_ATTR"))


def is_anothers(value: PyTree, fn: types.FunctionType) -> bool:
    """Return whether a global is a function of another file, which the adapter does not enter."""
    return inspect.isfunction(value) and value.__globals__ is not fn.__globals__


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the functions defined inside."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    return frozenset(name for inner in _codes(code) for name in inner.co_names)


@functools.lru_cache(maxsize=4096)
def assigned_globals(code: types.CodeType) -> frozenset[str]:
    """Return the globals that a function assigns."""
    return frozenset(_stores(code, "STORE_GLOBAL"))


def _stores(code: types.CodeType, opname: str) -> Iterator[str]:
    steps = (step for inner in _codes(code) for step in dis.get_instructions(inner))
    return (step.argval for step in steps if step.opname == opname)
