"""The interface of adapters, which contain all that tapax knows about frameworks.

Each framework has one adapter. No code outside of `_frameworks` knows a framework.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax

from tapax._frameworks.recurrent_cells import RecurrentCell, StatefulProgram
from tapax._jax import Function, PyTree
from tapax._sites import join, segment

Module: TypeAlias = Any
"""A module of a framework."""


def key_path(keys: Iterable[Any]) -> str:
    """Join the keys of a leaf to a path; a Haiku key, `mlp/~/linear_0`, is a path itself."""
    texts = (jax.tree_util.keystr((key,), simple=True) for key in keys)
    parts = (part for text in texts for part in re.sub(r"/~[^/]*", "", text).split("/"))
    return "/".join(map(segment, parts))


class Adapter:
    """The knowledge about a framework: what its modules are, and how to observe their calls."""

    package = ""
    """The top-level package of the framework, whose files are not the user's."""
    recurrent_type: type | tuple[()] = ()
    """The class of modules that may be recurrent."""
    container_types: tuple[type, ...] = ()
    """The classes of objects of the framework that are not modules, but may contain modules."""

    attention_types: tuple[type, ...] = ()
    """The classes of attention layers that take an attention function."""
    attention_function = ""
    """The name of the framework's attention function, whose weights tapax marks."""

    def is_module(self, value: PyTree) -> bool:
        """Return whether a value is a module of this framework."""
        raise NotImplementedError

    def children(self, module: Module) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of a module that may be modules or containers of modules, by name.

        An empty name adds nothing to the path: a wrapper has it for its wrapped module.
        """
        raise NotImplementedError

    def name(self, module: Module) -> str:
        """Return the name of a module that is not part of another."""
        return type(module).__name__

    def name_in_scope(self, module: Module) -> str:
        """Return the name of a module that shares the scope of the running module; empty if not."""
        return ""

    def path(self, model: Module, part: Module, path: str) -> str:
        """Return the module path of `part`, which the attributes of `model` have at `path`."""
        return join(self.name(model), path)

    def state(self, module: Module) -> Any:
        """Return the arrays of a module in a structure with the names of its attributes as keys."""
        return module

    def named_arrays(self, value: PyTree) -> Iterator[tuple[str, Any]]:
        """Yield the arrays of a module, or of another object of the framework, by path."""
        for keys, x in jax.tree_util.tree_leaves_with_path(self.state(value)):
            yield key_path(keys), x

    def wraps(self, value: PyTree) -> bool:
        """Return whether a value is a wrapper of the framework around a module."""
        return False

    def maker(self, model: Module) -> Callable[..., Any] | None:
        """Return the function whose call creates the modules of a model; None if they exist."""
        return None

    def has_site(self, module: Module) -> bool:
        """Return whether the result of a module is a site; a container of modules has none."""
        return callable(module)

    def is_opaque(self, value: PyTree) -> bool:
        """Return whether a part of a result is an object whose arrays are not results."""
        return self.is_module(value)

    def observe_calls(self) -> contextlib.AbstractContextManager[Any]:
        """Observe calls of modules within the context; restore the framework afterwards."""
        raise NotImplementedError

    def trace_program(self, trace: Callable[[], Any]) -> Any:
        """Trace a program; an adapter may retry in another way if the first attempt fails."""
        return trace()

    def context(self) -> Hashable:
        """Return a value of all settings of the framework on which a trace depends."""
        return None

    def has_repeatable_calls(self, fn: Function) -> bool:
        """Return whether equal arguments and equal state mean equal calls of a function.

        They do if the function is a module, or if the framework jitted it, so that it keeps the
        values that it closes over.
        """
        return False

    def static_parts(self, call: FunctionCall) -> Callable[[Any], bool] | None:
        """Return a predicate for the parts of the arguments in which Python numbers are static."""
        return None

    def open_call(self, call: FunctionCall) -> contextlib.AbstractContextManager[FunctionCall]:
        """Split the stateful objects in the call of a captured function into arrays."""
        return contextlib.nullcontext(call)

    def recurrent_cell(self, module: Module, inputs: Sequence[Any], state: PyTree) -> RecurrentCell:
        """Describe a module of `recurrent_type` as a pure step.

        `inputs` are example inputs; `state` replaces the initial state unless it is None.
        """
        raise NotImplementedError

    def stateful_program(
        self, module: Module, inputs: Sequence[Any], state: PyTree
    ) -> StatefulProgram | None:
        """Trace a module of `recurrent_type` that writes its states in place; None for others."""
        return None


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A function, its arguments, and a function `close` from its result to the user's result."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    close: Callable[[Any], Any] = lambda out: out
    memory: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """Facts about the function that adapters remember from one call to the next."""
    user_result: Callable[[Any], Any] = lambda out: out
    """A function from the result of `fn` to the result of the user's function, without state."""
    found_more: Callable[[], bool] = lambda: False
    """A function that tells whether the trace met unsplit state, so that its program is useless."""
    user_keys: tuple[int, ...] = ()
    """The indices in `arguments` of those of the user's call: positional, keywords, function."""

    @property
    def arguments(self) -> Any:
        """The parts of the call that may contain arrays: arguments, and a function with leaves."""
        whole = jax.tree_util.all_leaves([self.fn])
        return self.args, self.kwargs, None if whole else self.fn

    def run(self, arguments: PyTree) -> Any:
        """Run the call on other arguments of the same structure."""
        args, kwargs, fn = arguments
        return (self.fn if fn is None else fn)(*args, **kwargs)
