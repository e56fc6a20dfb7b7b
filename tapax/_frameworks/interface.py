"""What an adapter is: all that tapax knows of a framework.

There is one for each framework. Nothing outside of `_frameworks` knows a framework.
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
    """The keys of a leaf as a path; a key of Haiku's, `mlp/~/linear_0`, is one itself."""
    texts = (jax.tree_util.keystr((key,), simple=True) for key in keys)
    parts = (part for text in texts for part in re.sub(r"/~[^/]*", "", text).split("/"))
    return "/".join(map(segment, parts))


class Adapter:
    """What tapax knows of a framework: what a module is, where it is, how its calls are seen."""

    package = ""
    """The top-level package of the framework, whose files are not the user's."""
    recurrent_type: type | tuple[()] = ()
    """The class of modules that may be recurrent."""

    def is_module(self, value: PyTree) -> bool:
        """Whether a value is a module of this framework."""
        raise NotImplementedError

    def children(self, module: Module) -> Iterator[tuple[str, Any]]:
        """The attributes of a module that may be modules, or containers of some, by name.

        A name that is empty adds nothing to the path: it is that of something wrapped.
        """
        raise NotImplementedError

    def name(self, module: Module) -> str:
        """What to call a module that is in no other."""
        return type(module).__name__

    def path(self, model: Module, part: Module, path: str) -> str:
        """The path of a module from the root of a model, in which it is found at `path`."""
        return join(self.name(model), path)

    def state(self, module: Module) -> Any:
        """The arrays of a module, in a structure with the names of its attributes as keys."""
        return module

    def named_arrays(self, value: PyTree) -> Iterator[tuple[str, Any]]:
        """The arrays of a module, or of another object of the framework's, by path."""
        for keys, x in jax.tree_util.tree_leaves_with_path(self.state(value)):
            yield key_path(keys), x

    def wraps(self, value: PyTree) -> bool:
        """Whether a value is no module, but something of the framework's around one."""
        return False

    def maker(self, model: Module) -> Callable[..., Any] | None:
        """The function by whose call the modules of a model come to be, if they do so by one."""
        return None

    def has_site(self, module: Module) -> bool:
        """Whether what a module returns is a site: a container of modules returns nothing."""
        return callable(module)

    def is_opaque(self, value: PyTree) -> bool:
        """Whether a part of a result is an object of its own, whose arrays are not results."""
        return self.is_module(value)

    def observe_calls(self) -> contextlib.AbstractContextManager[Any]:
        """Within, calls of modules are seen; afterwards the framework is as it was before."""
        raise NotImplementedError

    def trace_program(self, trace: Callable[[], Any]) -> Any:
        """Traces a program, and once more in another way if the first fails and may have to."""
        return trace()

    def context(self) -> Hashable:
        """Everything of the framework's, besides arguments, that decides what is traced."""
        return None

    def has_repeatable_calls(self, fn: Function) -> bool:
        """Whether equal arguments, and equal state, mean equal calls of a function.

        They do if it is a module; or if it is jitted by the framework, and so keeps what it closes
        over.
        """
        return False

    def static_parts(self, call: FunctionCall) -> Callable[[Any], bool] | None:
        """Tells the parts of a call's arguments in which Python numbers are static."""
        return None

    def open_call(self, call: FunctionCall) -> contextlib.AbstractContextManager[FunctionCall]:
        """The call of a captured function with its stateful objects taken apart into arrays."""
        return contextlib.nullcontext(call)

    def recurrent_cell(self, module: Module, inputs: Sequence[Any], state: PyTree) -> RecurrentCell:
        """Describes a module of `recurrent_type` as a pure step.

        `inputs` are an example of the inputs; `state` replaces the initial state unless it is None.
        """
        raise NotImplementedError

    def stateful_program(
        self, module: Module, inputs: Sequence[Any], state: PyTree
    ) -> StatefulProgram | None:
        """Traces a module of `recurrent_type` that writes its states in place; None for others."""
        return None


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A function, its arguments, and what makes the result that the user sees of its own."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    close: Callable[[Any], Any] = lambda out: out
    memory: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """What adapters have learned of the function, from one call to the next."""
    own: Callable[[Any], Any] = lambda out: out
    """What of the result is the function's own, and no state."""
    found_more: Callable[[], bool] = lambda: False
    """Whether the trace met state that was not taken apart; its program is of no use then."""
    own_keys: tuple[int, ...] = ()
    """Where in `arguments` those of the user's own call are: positional, keywords, function."""

    @property
    def arguments(self) -> Any:
        """What of the call may hold arrays: the arguments, and a function that is a structure."""
        whole = jax.tree_util.all_leaves([self.fn])
        return self.args, self.kwargs, None if whole else self.fn

    def run(self, arguments: PyTree) -> Any:
        """Makes the call, on other arguments of the same structure."""
        args, kwargs, fn = arguments
        return (self.fn if fn is None else fn)(*args, **kwargs)
