"""The free variables of a function, and the models among their values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from tapax._frameworks.interface import Adapter
from tapax._frameworks.model_variables import modules_in
from tapax._frameworks.module_tree import descendants
from tapax._frameworks.users_code import closure_values, is_users_code


def closed_over(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield a function, under an empty name, and its free variables, by name.

    These are the variables that it closes over, the globals that it uses, the object whose method
    it is, and the arguments of a partial; for a wrapped function, also those of the inner one.
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
            inner = getattr(fn, "__wrapped__", None)
            # A function that wraps one with its own code is a copy, made for other values.
            is_copy = inspect.isfunction(inner) and inner.__code__ is getattr(fn, "__code__", None)
            fn = None if is_copy else inner


def closed_over_modules(fn: Any, adapters: Sequence[Adapter]) -> Iterator[tuple[str, Any]]:
    """Yield the models among the free variables of a function, and of functions among these.

    A module that is part of another is left out.
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
    yield from (named for key, named in found.items() if key not in inside)
