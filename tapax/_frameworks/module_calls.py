"""The calls of modules, seen while a program is traced: their results become sites.

An adapter calls `called` for every method of a module that runs. The result is named by where the
module is in the model: `GPT/blocks/3/attn`, `GPT/encoder.encode`. If a selection asks for them, so
are the arrays that it is called on: `GPT/blocks/3/attn.input`, or, where there are several,
`attn.input:0` and `attn.input:mask`.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tapax._frameworks.interface import Adapter, Module
from tapax._frameworks.module_paths import (
    RunningModule,
    enter_module,
    locate,
    rooted,
    running_modules,
)
from tapax._jax import Args, Kwargs, PyTree, Value
from tapax._jax.pytrees import map_with_path
from tapax._marks.context import active_policy
from tapax._marks.scopes import ModuleScope
from tapax._marks.sow import leaf_name
from tapax._marks.tap import Mark, tap
from tapax._sites import ASKED


@dataclasses.dataclass(frozen=True)
class MethodCall:
    """The call of a method of a module: `run(*args, **kwargs)` makes it."""

    adapter: Adapter
    module: Module
    method: str
    run: Callable[..., Any]
    args: Args
    kwargs: Kwargs

    def run_marked(self) -> Any:
        """Makes the call on what is marked of its arguments."""
        args, kwargs = mark_inputs(self)
        return self.run(*args, **kwargs)


def called(call: MethodCall, place: ModuleScope | None = None) -> Any:
    """Runs a method of a module, within the module's scope; its result becomes a site.

    `place` is where the module is, if the framework knows.
    """
    with within(call.adapter, call.module, place):
        return mark_result(call.adapter, call.module, call.method, call.run_marked())


@contextlib.contextmanager
def within(adapter: Adapter, module: Module, place: ModuleScope | None = None) -> Iterator[None]:
    """The scope of a module; entering the one that is running already changes nothing."""
    place = rooted(locate(adapter, module) if place is None else place)
    if not place and not place.up:
        yield
        return
    # The frame of whoever enters this: two of contextlib's are between.
    frame = sys._getframe(2)
    new = RunningModule(adapter, module, frame, place.root) if place else None
    with enter_module(new, place.up), jax.named_scope(place):
        yield


def mark_result(adapter: Adapter, module: Module, method: str, out: PyTree) -> Any:
    """Makes what a method of a module returned a site, if a capture admits it; returns it."""
    mark = _marker(adapter, module, method, "module")
    return out if mark is None else map_with_path(mark, out, adapter.is_opaque)


def asks_for_inputs() -> bool:
    """Whether a selection asks for the inputs of modules."""
    here = active_policy()
    return here is not None and "input" in here.asked


def mark_inputs(call: MethodCall) -> tuple[Args, Kwargs]:
    """Makes the arrays among the arguments of a call sites, if a selection asks for them."""
    if not asks_for_inputs():
        return call.args, call.kwargs
    mark = _marker(call.adapter, call.module, call.method, "input")
    if mark is None:
        return call.args, call.kwargs
    given = {**{str(i): x for i, x in enumerate(call.args)}, **call.kwargs}
    arrays = [name for name, x in given.items() if _holds_array(call.adapter, x)]

    def marked(name: str) -> Any:
        # The only argument needs no name.
        key = () if len(arrays) == 1 else (jax.tree_util.DictKey(name),)
        leaf = lambda keys, x: mark((*key, *keys), x)  # noqa: E731
        return map_with_path(leaf, given[name], call.adapter.is_opaque)

    given.update((name, marked(name)) for name in arrays)
    return tuple(given[str(i)] for i in range(len(call.args))), {k: given[k] for k in call.kwargs}


def mark_weights(weights: Value) -> Any:
    """Makes the weights of attention a site of the module that is running, if one is asked for.

    Where none is, they are named by the scopes around.
    """
    here, running = active_policy(), running_modules()
    if here is None or "weights" not in here.asked:
        return weights
    if not running:
        said: dict[str, Any] = {"admitted": here.modules, **here.on_marks}
        return tap(weights, Mark(ASKED["weights"], "weights", _user_line("jax"), **said))
    mark = _marker(running[-1].adapter, running[-1].module, "__call__", "weights")
    return weights if mark is None else mark((), weights)


def _holds_array(adapter: Adapter, value: PyTree) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=adapter.is_opaque)
    return any(isinstance(x, (jax.Array, np.ndarray)) for x in leaves)


def _marker(
    adapter: Adapter, module: Module, method: str, kind: str
) -> Callable[[tuple[Any, ...], Value], Any] | None:
    """A function that marks an array that a method takes or returns; None if no capture admits it.

    It is given the keys of the array, too.
    """
    here = active_policy()
    admitted = here.admits(module, method) if here is not None else frozenset()
    if here is None or not admitted:
        return None
    source = _user_line(adapter.package)
    suffix = ("" if method == "__call__" else f".{method}") + ASKED.get(kind, "")
    fields: dict[str, Any] = {"module": type(module), "method": method, "admitted": admitted}
    fields["members"] = getattr(module, "__tap_members__", None) if kind == "module" else None

    def mark(keys: tuple[Any, ...], x: Value) -> Any:
        if not isinstance(x, (jax.Array, np.ndarray)):
            return x
        path = suffix + (f":{leaf_name(keys)}" if keys else "")
        return tap(x, Mark(path, kind, source, **fields, **here.on_marks))

    return mark


def _user_line(package: str) -> str:
    """`file:line` of the user's code that called a module of a package."""
    ours = ("tapax", "jax", package)
    frame = sys._getframe(2)
    while frame is not None:
        here = frame.f_globals.get("__name__", "").partition(".")[0]
        if here not in ours and here not in ("contextlib", "functools"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
