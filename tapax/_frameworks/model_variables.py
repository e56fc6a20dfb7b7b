"""The variables of running functions that refer to a model, or to models of its kind."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from jax.core import Tracer

from tapax._frameworks.interface import Adapter, Module
from tapax._frameworks.module_tree import CONTAINERS, arrays, descendants, kind
from tapax._frameworks.users_code import NOT_USERS, is_users_code
from tapax._jax import PyTree
from tapax._sites import is_machinery, join, segment


@dataclasses.dataclass(frozen=True)
class ModelVariables:
    """The variables of running functions that refer to a module, or to models of its kind.

    `holder` is the path of the variable that refers to the module, or to the model of which it may
    be a copy; empty if there is none, or if it may be one of several. `constants` are the models of
    its kind with constant arrays: the path of the variable, and a weak reference to the array at
    `leaf`.
    """

    holder: str
    constants: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, adapter: Adapter, module: Module, until: Any, leaf: str | None) -> ModelVariables:
        is_of_kind: dict[int, bool] = {id(module): True}
        constants: dict[int, tuple[str, Any]] = {}
        holder = None
        for frame, may_copy in reversed(list(_user_frames(until))):
            found = [
                (path, model)
                for name, value in _variables(frame)
                for path, model in modules_in(adapter, name, value)
                # Every method has its module as `self`.
                if type(model) is type(module) and (path != "self" or model is not module)
            ]
            for _, model in found:
                if id(model) not in is_of_kind:
                    is_of_kind[id(model)] = kind(adapter, model) == kind(adapter, module)
            found = [(path, model) for path, model in found if is_of_kind[id(model)]]
            exact = [path for path, model in found if model is module]
            if holder is None and (exact or (found and may_copy)):
                several = len({id(model) for _, model in found}) > 1
                holder = exact[0] if exact else "" if several else found[0][0]
            for path, model in found:
                if id(model) not in constants:
                    x = dict(arrays(adapter, model)).get(leaf or "")
                    is_constant = x is not None and not isinstance(x, Tracer)
                    constants[id(model)] = path, weakref.ref(x) if is_constant else None
        return cls(holder or "", tuple((path, x) for path, x in constants.values() if x))


def is_being_made(module: Module, until: Any) -> bool:
    """Return whether the constructor of a module is running, so that no variable refers to it."""
    frame = sys._getframe(1)
    while frame is not None and frame is not until:
        code = frame.f_code
        is_constructor = code.co_name in _CONSTRUCTORS and code.co_argcount > 0
        if is_constructor and frame.f_locals.get(code.co_varnames[0]) is module:
            return True
        frame = frame.f_back
    return False


_CONSTRUCTORS = frozenset({"__init__", "__post_init__", "__check_init__"})


def _user_frames(until: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the frames of users' functions that were entered after `until`, innermost first.

    Also tell whether a transformation of JAX is running in it, which may have copied its models.
    """
    frame = sys._getframe(2)
    is_inside = is_transformed = False
    while frame is not None and frame is not until:
        module = frame.f_globals.get("__name__")
        if is_users_code(module):
            yield frame, is_transformed
            is_inside = True
        elif is_inside and str(module).partition(".")[0] == "jax":
            is_transformed = True
        frame = frame.f_back


def _variables(frame: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a running function: local, closed over, and the globals it uses."""
    yield from list(frame.f_locals.items())
    for name in frame.f_code.co_names:
        if name in frame.f_globals:
            yield name, frame.f_globals[name]


def modules_in(
    adapter: Adapter, path: str, value: PyTree, depth: int = 2
) -> Iterator[tuple[str, Any]]:
    """Yield the modules in the value of a variable: itself, or in containers and attributes."""
    if adapter.is_module(value):
        yield path, value
    elif adapter.wraps(value):
        yield from ((join(path, below), part) for below, part in descendants(adapter, value))
    elif depth:
        for name, part in _parts(value):
            yield from modules_in(adapter, join(path, name), part, depth - 1)


def _parts(value: PyTree) -> Iterable[tuple[str, Any]]:
    """List the items of a container, or the attributes of an object of a user's class."""
    if isinstance(value, CONTAINERS):
        if len(value) > _MANY:
            return ()
        if isinstance(value, dict):
            return [(segment(key), part) for key, part in value.items()]
        names = getattr(value, "_fields", range(len(value)))
        return [(str(name), part) for name, part in zip(names, value, strict=True)]
    if not _is_users_object(type(value)):
        return ()
    try:
        # An object that is still being made may not answer to its own `__getattr__`.
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return list(attributes.items()) if len(attributes) <= _MANY else ()


_MANY = 64


@functools.cache
def _is_users_object(cls: type) -> bool:
    package = cls.__module__.partition(".")[0]
    known = package in NOT_USERS or package in sys.stdlib_module_names or package == "jaxlib"
    return not (known or is_machinery(cls) or issubclass(cls, (type, BaseException, Tracer)))
