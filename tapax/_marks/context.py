"""The context that switches marks on, and says what the captures of this thread mark.

It is a user context of JAX, and as such part of the key of every `jit` cache: JAX retraces a jitted
function under capture even if it was called before, and equal captures share a trace. Creating a
user context makes JAX retrace every jitted function of the process, so tapax creates a single one
on import, which stores all `ContextVariable`s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeAlias, TypeVar

from tapax._jax import Function, PyTree, pytrees, typed
from tapax._sites import Rule

T = TypeVar("T")
ModuleFilter: TypeAlias = Callable[[Any, str], bool] | bool
"""A filter `(module, method name) -> bool`, or True for all modules with public methods."""


class Structure:
    """The structure of the arguments of a captured function; equal structures are one object.

    The path of a module depends on the model, so JAX must not reuse the trace of one model for
    another. The path may also depend on the names of the variables of the function.
    """

    __slots__ = ()

    @classmethod
    def of(cls, arguments: PyTree, fn: Function) -> Structure | None:
        code = getattr(inspect.unwrap(fn), "__code__", None)
        names = code and (code.co_varnames, code.co_freevars, code.co_names)
        try:
            return cls._known(pytrees.structure(arguments), names)
        except TypeError:  # some part of the structure is not hashable
            return None

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def _known(treedef: Any, names: Any) -> Structure:
        del treedef, names
        return Structure()


@dataclasses.dataclass(frozen=True)
class MarkingPolicy:
    """The settings of a capture for marks; hashable, so that equal captures hit JAX's caches.

    - `read`: the values that the filters in `modules` read, apart from their arguments.
    - `asked`: the kinds of sites that exist only because a selection asks for them.
    - `changing`: whether marked values may be edited.
    - `replacing`: whether other values may replace the marked ones.
    - `pairs`: whether a reducer compares gradients with their values.
    - `uses_weights`: whether attention layers must compute their results from their weights, as
      these are changed or differentiated.
    - `parameters`: whether to mark the parameters too: see `_marks.parameters`.
    """

    rules: frozenset[Rule] = frozenset()
    modules: frozenset[ModuleFilter] = frozenset()
    read: frozenset[Hashable] = frozenset()
    asked: frozenset[str] = frozenset()
    structure: Structure | None = None
    changing: bool = False
    replacing: bool = False
    pairs: bool = False
    uses_weights: bool = False
    parameters: bool = False

    def admits(self, module: Any, method: str) -> frozenset[ModuleFilter]:
        """Return the module filters that make the result of a method a site."""
        public = method == "__call__" or not method.startswith("_")
        return frozenset(p for p in self.modules if (p(module, method) if callable(p) else public))

    def __or__(self, other: MarkingPolicy) -> MarkingPolicy:
        union = ("rules", "modules", "read", "asked", "uses_weights", "parameters", *self.on_marks)
        both = {name: getattr(self, name) | getattr(other, name) for name in union}
        return MarkingPolicy(structure=self.structure, **both)

    @property
    def on_marks(self) -> dict[str, Any]:
        """The settings that every mark stores."""
        return {name: getattr(self, name) for name in ("changing", "replacing", "pairs")}


_context = typed.make_user_context(())


class ContextVariable(Generic[T]):
    """A thread-local variable that is part of the key of every `jit` cache while it is set."""

    def __init__(self, default: T):
        self._default = default

    @property
    def value(self) -> T:
        return next((value for key, value in _context.value if key is self), self._default)

    def __call__(self, value: T) -> contextlib.AbstractContextManager[Any]:
        """Set the variable to `value` within the context."""
        others = tuple(pair for pair in _context.value if pair[0] is not self)
        return _context(others if value is self._default else (*others, (self, value)))


_policy = ContextVariable[MarkingPolicy | None](None)


def active_policy() -> MarkingPolicy | None:
    """Return the marking policy of this thread; None outside of a capture."""
    return _policy.value


def set_policy(policy: MarkingPolicy | None) -> contextlib.AbstractContextManager[Any]:
    """Set the marking policy of this thread within the context."""
    return _policy(policy)


def without_marks() -> contextlib.AbstractContextManager[Any]:
    """Switch marks off within the context."""
    return set_policy(None)
