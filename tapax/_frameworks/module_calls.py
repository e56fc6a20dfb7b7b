"""The calls of modules, seen while a program is traced: their results become sites.

An adapter calls `called` for every method of a module that runs. The result is named by where the
module is in the model: `GPT/blocks/3/attn`, `GPT/encoder.encode`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tapax._frameworks.interface import Adapter, Module
from tapax._frameworks.module_paths import RunningModule, enter_module, locate, rooted
from tapax._jax import PyTree, Value
from tapax._jax.pytrees import map_with_path
from tapax._marks.context import active_policy
from tapax._marks.scopes import ModuleScope
from tapax._marks.sow import leaf_name
from tapax._marks.tap import Mark, tap


def called(
    adapter: Adapter,
    module: Module,
    method: str,
    run: Callable[[], Any],
    place: ModuleScope | None = None,
) -> Any:
    """Runs a method of a module, within the module's scope; its result becomes a site.

    `place` is where the module is, if the framework knows.
    """
    with within(adapter, module, place):
        return mark_result(adapter, module, method, run())


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
    here = active_policy()
    admitted = here.admits(module, method) if here is not None else frozenset()
    if here is None or not admitted:
        return out
    source = _user_line(adapter)
    suffix = "" if method == "__call__" else f".{method}"

    def leaf(keys: tuple[Any, ...], x: Value) -> Any:
        if not isinstance(x, (jax.Array, np.ndarray)):
            return x
        path = suffix + (f":{leaf_name(keys)}" if keys else "")
        fields: dict[str, Any] = {"module": type(module), "method": method, "admitted": admitted}
        fields["members"] = getattr(module, "__tap_members__", None)
        return tap(x, Mark(path, "module", source, **fields, **here.on_marks))

    return map_with_path(leaf, out, adapter.is_opaque)


def _user_line(adapter: Adapter) -> str:
    """`file:line` of the user's code that called a module."""
    ours = ("tapax", "jax", adapter.package)
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ours and package not in ("contextlib", "functools"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
