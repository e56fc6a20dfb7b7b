"""Haiku: a transformed function makes and calls its modules, which know their names.

The adapter observes calls through `hk.intercept_methods`. A module has its name in Haiku, which its
parameters have too, without the segments that name the method in which it was made:
`mlp/~/linear_0` becomes `mlp/linear_0`. Its scope is relative to the running module.

In a function that is transformed within another, such as the body of `hk.layer_stack`, Haiku's
names start from an empty path. The adapter names a module there as part of the module that was
running when it was made.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import haiku as hk
import jax

from tapax._frameworks.attention import marks_softmax
from tapax._frameworks.interface import Adapter, Module
from tapax._frameworks.module_calls import MethodCall, called
from tapax._frameworks.module_paths import scope_of_named
from tapax._frameworks.patches import Patch, is_first, mixin_methods
from tapax._frameworks.recurrent_cells import (
    RecurrentCell,
    call_with_inputs,
    check_inputs,
    find_input_shape,
)
from tapax._jax import Args, Function, Kwargs, PyTree
from tapax._marks.context import active_policy
from tapax._sites import join

# Files with modules that are not layers: name scopes, and the results of `hk.lift`.
_MACHINERY = frozenset({hk.Module.__module__, hk.lift.__module__})
_FORCED = hk.experimental.force_name("")  # pyright: ignore[reportPrivateImportUsage]


class _HaikuCalls(threading.local):
    """The modules whose methods are running on this thread, and the maker of each module."""

    def __init__(self) -> None:
        self.captures = 0
        self.stack: list[Any] = []
        self.made: dict[int, tuple[Any, Any]] = {}


class Haiku(Adapter):
    package = "haiku"
    recurrent_type = hk.RNNCore

    def __init__(self) -> None:
        self._calls = _HaikuCalls()
        self._patch = Patch(lambda: mixin_methods(hk.Module, self._of_mixin))

    def is_module(self, value: PyTree) -> bool:
        return isinstance(value, hk.Module)

    def children(self, module: Module) -> Iterator[tuple[str, Any]]:
        return iter(())

    def name(self, module: Module) -> str:
        return self._path(module)

    def maker(self, model: Module) -> Any:
        if not isinstance(model, (hk.Transformed, hk.TransformedWithState)):
            return None
        return lambda *args, **kwargs: model.init(jax.random.key(0), *args, **kwargs)

    @contextlib.contextmanager
    def observe_calls(self) -> Iterator[None]:
        calls = self._calls
        calls.captures += 1
        try:
            with contextlib.ExitStack() as stack:
                if calls.captures == 1:
                    stack.enter_context(hk.intercept_methods(self._intercept))
                    stack.enter_context(self._patch())
                yield
        finally:
            calls.captures -= 1
            if not calls.captures:
                calls.made.clear()

    def recurrent_cell(self, module: Module, inputs: Sequence[Any], state: PyTree) -> RecurrentCell:
        """Describe a core; the transformed function has its parameters, so there are none here."""
        check_inputs(module, inputs)
        ndim = len(getattr(module, "input_shape", ())) + 1
        shape = find_input_shape(inputs)
        batch = shape[0] if len(shape) > ndim else None
        core: Any = module
        initial = core.initial_state(batch)
        # The first call creates the parameters, which must not happen under a trace.
        call_with_inputs(core, *inputs, initial)

        def step(params: PyTree, state: PyTree, *inputs: PyTree, **keywords: PyTree) -> Any:
            del params
            out, new = core(*inputs, state, **keywords)
            return new, out

        return RecurrentCell(step, {}, initial if state is None else state)

    def _intercept(self, run: Any, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> Any:
        if active_policy() is None:
            return run(*args, **kwargs)
        module, method, stack = context.module, context.method_name, self._calls.stack
        if method == "__init__" and id(module) not in self._calls.made:
            forced = any(str(x).startswith(_FORCED) for x in (*args, *kwargs.values()))
            maker = stack[-1] if stack and not forced else None
            self._calls.made[id(module)] = module, maker
        stack.append(module)
        try:
            if not _is_seen(context):
                return run(*args, **kwargs)
            if isinstance(module, hk.MultiHeadAttention) and method == "__call__":
                run = marks_softmax(run)
            scope = scope_of_named(self, module)
            return called(MethodCall(self, module, method, run, args, kwargs), scope)
        finally:
            stack.pop()

    def _of_mixin(self, owner: type, name: str, original: Function) -> Any:
        """Wrap a method of a mixin, which Haiku does not intercept."""

        @functools.wraps(original)
        def method(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(original, module)
            if not self.is_module(module):
                return run(*args, **kwargs)
            context: Any = types.SimpleNamespace(module=module, method_name=name, orig_class=owner)
            return self._intercept(run, args, kwargs, context)

        return method

    def _path(self, module: Module) -> str:
        """Return the name of a module, from the outermost transformed function."""
        name = _without_methods(module.module_name)
        _, maker = self._calls.made.get(id(module), (module, None))
        if maker is None:
            return name
        outer = _without_methods(maker.module_name)
        return join(self._path(maker), name.removeprefix(f"{outer}/"))


def _is_seen(context: hk.MethodContext) -> bool:
    method, owner = context.method_name, context.orig_class
    if owner.__module__ in _MACHINERY or (method.startswith("__") and method != "__call__"):
        return False
    # A method that a subclass calls by `super()` is part of the method of the subclass.
    return is_first(owner, method, type(context.module))


def _without_methods(name: str) -> str:
    """Remove the segments that name methods, such as `~` or `~encode`, from a module's name."""
    return "/".join(part for part in name.split("/") if not part.startswith("~"))


ADAPTER = Haiku()
