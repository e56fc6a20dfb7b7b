"""Calls of modules: while a program is traced, their results become sites.

An adapter calls `called` for every method of a module that runs. The name of the result is the
module path: `GPT/blocks/3/attn`, or `GPT/encoder.encode` for another method. If a selection asks
for them, the arrays among the arguments become sites too: `GPT/blocks/3/attn.input`, or
`attn.input:0` and `attn.input:mask` if there are several.
"""

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
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
    """The call `run(*args, **kwargs)` of a method of a module."""

    adapter: Adapter
    module: Module
    method: str
    run: Callable[..., Any]
    args: Args
    kwargs: Kwargs

    def run_marked(self) -> Any:
        """Mark the arguments of the call, if a selection asks for them, and run it."""
        args, kwargs = mark_inputs(self)
        if self.method != "__call__" or not _asks_for("weights"):
            return self.run(*args, **kwargs)
        if not isinstance(self.module, self.adapter.attention_types):
            return self.run(*args, **kwargs)
        before = _weights.count
        out = self.run(*args, **kwargs)
        if _weights.count == before:
            _mark_missing_weights(self)
        return out


class _WeightCount(threading.local):
    """The number of attention weights that this thread has marked."""

    count = 0


_weights = _WeightCount()


def called(call: MethodCall, scope: ModuleScope | None = None) -> Any:
    """Run a method of a module within the scope of the module, and make its result a site.

    `scope` is that scope if the framework knows it.
    """
    with within(call.adapter, call.module, scope):
        return mark_result(call.adapter, call.module, call.method, call.run_marked())


@contextlib.contextmanager
def within(adapter: Adapter, module: Module, scope: ModuleScope | None = None) -> Iterator[None]:
    """Enter the scope of a module; entering that of the running module changes nothing."""
    scope = rooted(locate(adapter, module) if scope is None else scope)
    if not scope and not scope.up:
        yield
        return
    # The frame that enters this context; two frames of contextlib are in between.
    frame = sys._getframe(2)
    new = RunningModule(adapter, module, frame, scope.root) if scope else None
    with enter_module(new, scope.up), jax.named_scope(scope):
        yield


def mark_result(adapter: Adapter, module: Module, method: str, out: PyTree) -> Any:
    """Mark the result of a method of a module as a site, if a capture admits it; return it."""
    mark = _marker(adapter, module, method, "module")
    return out if mark is None else map_with_path(mark, out, adapter.is_opaque)


def asks_for_inputs() -> bool:
    """Return whether a selection asks for the inputs of modules."""
    return _asks_for("input")


def _asks_for(kind: str) -> bool:
    here = active_policy()
    return here is not None and kind in here.asked


def mark_inputs(call: MethodCall) -> tuple[Args, Kwargs]:
    """Mark the arrays among the arguments of a call as sites, if a selection asks for them."""
    if not asks_for_inputs():
        return call.args, call.kwargs
    mark = _marker(call.adapter, call.module, call.method, "input")
    if mark is None:
        return call.args, call.kwargs
    # A keyword may be "0", too.
    given: dict[int | str, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    arrays = [name for name, x in given.items() if _has_array(call.adapter, x)]

    def marked(name: int | str) -> Any:
        # A single argument needs no name.
        key = () if len(arrays) == 1 else (jax.tree_util.DictKey(str(name)),)
        leaf = lambda keys, x: mark((*key, *keys), x)  # noqa: E731
        return map_with_path(leaf, given[name], call.adapter.is_opaque)

    given.update((name, marked(name)) for name in arrays)
    return tuple(given[i] for i in range(len(call.args))), {k: given[k] for k in call.kwargs}


def mark_weights(weights: Value) -> Any:
    """Mark attention weights as a site of the running module, if a selection asks for them.

    If no module is running, the scopes around name the site.
    """
    here, running = active_policy(), running_modules()
    if here is None or "weights" not in here.asked:
        return weights
    _weights.count += 1
    if not running:
        said: dict[str, Any] = {"admitted": here.modules, **here.on_marks}
        return tap(weights, Mark(ASKED["weights"], "weights", _user_line("jax"), **said))
    mark = _marker(running[-1].adapter, running[-1].module, "__call__", "weights")
    return weights if mark is None else mark((), weights)


def _mark_missing_weights(call: MethodCall) -> None:
    """Mark that a call of an attention layer computes no weights that tapax can see."""
    here = active_policy()
    admitted = frozenset() if here is None else here.admits(call.module, call.method)
    if not admitted:
        return
    why = (
        "tapax cannot compute the weights of the layer's attention function, because it calls "
        f"neither {call.adapter.attention_function} nor jax.nn.dot_product_attention. Mark the "
        "weights inside that function with tapax.sow"
    )
    source, layer = _user_line(call.adapter.package), type(call.module)
    fields: dict[str, Any] = {"module": layer, "method": call.method, "admitted": admitted}
    tap(jnp.zeros(0, bool), Mark(ASKED["weights"], "weights", source, missing=why, **fields))


def _has_array(adapter: Adapter, value: PyTree) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=adapter.is_opaque)
    return any(isinstance(x, (jax.Array, np.ndarray)) for x in leaves)


def _marker(
    adapter: Adapter, module: Module, method: str, kind: str
) -> Callable[[tuple[Any, ...], Value], Any] | None:
    """Make a function of keys and an array that marks an input or a result of a method.

    Return None if no capture admits the site.
    """
    here = active_policy()
    admitted = here.admits(module, method) if here is not None else frozenset()
    if here is None or not admitted:
        return None
    source = _user_line(adapter.package)
    call = ("" if method == "__call__" else f".{method}") + ASKED.get(kind, "")
    suffix = adapter.name_in_scope(module) + call
    fields: dict[str, Any] = {"module": type(module), "method": method, "admitted": admitted}
    fields["members"] = getattr(module, "__tap_members__", None) if kind == "module" else None

    def mark(keys: tuple[Any, ...], x: Value) -> Any:
        if not isinstance(x, (jax.Array, np.ndarray)):
            return x
        path = suffix + (f":{leaf_name(keys)}" if keys else "")
        return tap(x, Mark(path, kind, source, **fields, **here.on_marks))

    return mark


def _user_line(package: str) -> str:
    """Return `file:line` of the user's code that called a module of a package."""
    ours = ("tapax", "jax", package)
    frame = sys._getframe(2)
    while frame is not None:
        here = frame.f_globals.get("__name__", "").partition(".")[0]
        if here not in ours and here not in ("contextlib", "functools"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
