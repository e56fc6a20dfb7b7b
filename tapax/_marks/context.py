"""The context in which marks exist: what the captures of this thread mark.

It is one of JAX's user contexts, which are part of the key of every `jit` cache: a function that
was jitted and called before is traced afresh under capture, and equal captures share what was
traced. Since a new user context makes every jitted function of the process trace again, there is
one, made when tapax is imported, and it holds all `ContextVariable`s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from tapax._jax import Function, PyTree, pytrees, typed
from tapax._sites import Rule

T = TypeVar("T")
ModuleFilter: TypeAlias = Callable[[Any, str], bool] | bool
"""Which modules are sites: a filter `(module, method name) -> bool`, or all with public methods."""


class Structure:
    """The structure of the arguments of a captured function: equal ones are the same object.

    Where a module is depends on the model, and so what is traced for one model is not for another.
    What it is called may depend on the names of the variables of the function.
    """

    __slots__ = ()

    @classmethod
    def of(cls, arguments: PyTree, fn: Function) -> Structure | None:
        code = getattr(inspect.unwrap(fn), "__code__", None)
        names = code and (code.co_varnames, code.co_freevars, code.co_names)
        try:
            return cls._known(pytrees.structure(arguments), names)
        except TypeError:  # something in it cannot be hashed
            return None

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def _known(treedef: Any, names: Any) -> Structure:
        del treedef, names
        return Structure()


@dataclasses.dataclass(frozen=True)
class MarkingPolicy:
    """What a capture marks: a hashable value, so that equal captures hit the caches of JAX.

    `asked` are the kinds of sites that exist only because a selection asks for them. `changing` if
    what is marked may be edited, `replacing` if other values may come in its place, `pairs` if
    gradients meet their values. It `uses_weights` if results must be computed from the weights of
    attention, as they are changed or differentiated. `parameters` if what the program
    differentiates by is marked too: see `_marks.parameters`.
    """

    rules: frozenset[Rule] = frozenset()
    modules: frozenset[ModuleFilter] = frozenset()
    asked: frozenset[str] = frozenset()
    structure: Structure | None = None
    changing: bool = False
    replacing: bool = False
    pairs: bool = False
    uses_weights: bool = False
    parameters: bool = False

    def admits(self, module: Any, method: str) -> frozenset[ModuleFilter]:
        """The policies by which what a method of a module returns is a site."""
        public = method == "__call__" or not method.startswith("_")
        return frozenset(p for p in self.modules if (p(module, method) if callable(p) else public))

    def __or__(self, other: MarkingPolicy) -> MarkingPolicy:
        union = ("rules", "modules", "asked", "uses_weights", "parameters", *self.on_marks)
        both = {name: getattr(self, name) | getattr(other, name) for name in union}
        return MarkingPolicy(structure=self.structure, **both)

    @property
    def on_marks(self) -> dict[str, Any]:
        """What every mark is told."""
        return {name: getattr(self, name) for name in ("changing", "replacing", "pairs")}


_context = typed.make_user_context(())


class ContextVariable(Generic[T]):
    """A variable of each thread, which is part of the key of every `jit` cache while it is set."""

    def __init__(self, default: T):
        self._default = default

    @property
    def value(self) -> T:
        return next((value for key, value in _context.value if key is self), self._default)

    def __call__(self, value: T) -> contextlib.AbstractContextManager[Any]:
        """Within, the variable has another value."""
        others = tuple(pair for pair in _context.value if pair[0] is not self)
        return _context(others if value is self._default else (*others, (self, value)))


_policy = ContextVariable[MarkingPolicy | None](None)


def active_policy() -> MarkingPolicy | None:
    """What is being marked on this thread; None outside of a capture."""
    return _policy.value


def set_policy(policy: MarkingPolicy | None) -> contextlib.AbstractContextManager[Any]:
    """Within, this is what is being marked on this thread."""
    return _policy(policy)


def without_marks() -> contextlib.AbstractContextManager[Any]:
    """Within, marks do not exist."""
    return set_policy(None)
