"""The functions that Linen runs on modules, and which of them are methods.

Linen reports every function that it runs with a module as the first argument: methods, and also the
functions that `nn.scan` and others lift. It reports them from inside the wrappers of some
decorators and from outside those of others, by a name that a decorator may have changed. So the
classes of the module tell whether the function is a method, and of which name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from tapax._frameworks.interface import Module
from tapax._jax import Function


@dataclasses.dataclass(frozen=True, eq=False)
class RunningFunction:
    """A running function whose first argument is a module.

    `method` is the name of the method; None if it has no site, as a lifted function.
    """

    module: Module
    function: Function
    method: str | None

    @classmethod
    def of(cls, module: Module, function: Function, name: str) -> RunningFunction:
        """Describe the function that Linen reports under a name."""
        return cls(module, function, _find_method(type(module), function, name))

    def is_part_of(self, outer: RunningFunction) -> bool:
        """Return whether `outer` is the same method, and calls this function to compute its result.

        It does so by `super()`, or in a decorator. If the method is transformed, a clone of the
        module runs it.
        """
        return (
            self.method == outer.method
            and self.function is not outer.function
            and isinstance(outer.module, type(self.module))
            and (self.module is outer.module or _is_clone(self.module, outer.module))
        )


def _find_method(cls: type, function: Function, name: str) -> str | None:
    """Return the name of the method of a class that is a function or wraps it, if it has sites."""
    found = [
        key
        for owner in cls.__mro__
        for key, value in vars(owner).items()
        if any(f is function for f in _wrapped_functions(value))
    ]
    # A method that was replaced after its class was made may call the one in the class statement.
    if not found and any(_is_in_class_statement(owner, function, name) for owner in cls.__mro__):
        found = [name]
    method = name if name in found else next(iter(found), None)
    is_special = method is not None and method.startswith("__") and method != "__call__"
    return None if is_special else method


def _wrapped_functions(value: Any) -> Iterator[Any]:
    """Yield a function and the functions that it wraps, outermost first."""
    seen: set[int] = set()
    while callable(value) and not isinstance(value, type) and id(value) not in seen:
        seen.add(id(value))
        yield value
        inner = "func" if isinstance(value, functools.partial) else "__wrapped__"
        value = getattr(value, inner, None)


def _is_in_class_statement(cls: type, function: Function, name: str) -> bool:
    written = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return written == (cls.__module__, f"{cls.__qualname__}.{name}")


def _is_clone(module: Module, of: Module) -> bool:
    """Return whether a transformation made a module to run instead of another."""
    bound = module.scope is not None and of.scope is not None
    return bound and module.path == of.path and contains(of, module)


def contains(around: Module, module: Module) -> bool:
    """Return whether a module is below the running module `around`, in the same `apply`."""
    if around.scope is None or module.path[: len(around.path)] != around.path:
        return False
    root = module.scope.root
    # A transformation makes a new root, with a debug path, for the variables that it lifts.
    return bool(root.debug_path) or root == around.scope.root
