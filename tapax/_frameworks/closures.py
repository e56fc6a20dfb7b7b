"""The variables that a function has besides its arguments, and the models that they hold."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

from tapax._frameworks.held_models import is_users_code, modules_in
from tapax._frameworks.interface import Adapter
from tapax._frameworks.module_tree import descendants


def closure_values(fn: types.FunctionType) -> list[Any]:
    """The values that a function closes over; None for a variable without a value yet."""
    cells = fn.__closure__ or ()
    # Empty cells are equal, and to no other.
    return [None if cell == types.CellType() else cell.cell_contents for cell in cells]


def closed_over(fn: Any) -> Iterator[tuple[str, Any]]:
    """A function and the variables that it has besides its arguments, by name.

    They are what it closes over, the globals that it uses, the object that it is a method of, and
    what is bound in a partial; of a wrapped function, those of the function too.
    """
    while fn is not None:
        yield "", fn
        if inspect.ismethod(fn):
            yield "self", fn.__self__
            fn = fn.__func__
        if inspect.isfunction(fn):
            names = (name for name in fn.__code__.co_names if name in fn.__globals__)
            yield from ((name, fn.__globals__[name]) for name in names)
            yield from zip(fn.__code__.co_freevars, closure_values(fn), strict=True)
        if isinstance(fn, functools.partial):
            yield from ((f"arg{i}", value) for i, value in enumerate(fn.args))
            yield from fn.keywords.items()
            fn = fn.func
        else:
            fn = getattr(fn, "__wrapped__", None)


def held_modules(fn: Any, adapters: Sequence[Adapter]) -> Iterator[tuple[str, Any]]:
    """The models that a function holds by its variables, and by those of functions among these.

    A module is left out if it is a part of another.
    """
    pending, seen, found = [fn], set[int](), dict[int, tuple[str, Any]]()
    inside: set[int] = set()
    while pending:
        function = pending.pop(0)
        seen.add(id(function))
        for name, value in closed_over(function):
            for adapter in adapters:
                for path, module in modules_in(adapter, name, value):
                    found.setdefault(id(module), (path, module))
                    inside.update(id(part) for _, part in descendants(adapter, module))
            is_function = inspect.isfunction(value) or inspect.ismethod(value)
            if is_function and id(value) not in seen and is_users_code(value.__module__):
                pending.append(value)
    yield from (held for key, held in found.items() if key not in inside)
