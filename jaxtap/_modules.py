"""Modules: their calls, seen while a program is traced, and the names of those calls.

An adapter calls `called` for every method of a module that runs. The result becomes a site, named
by where the module is in the model: `GPT/blocks/3/attn`, `GPT/encoder.encode`.

Where a module is comes from the call stack: it is looked for in the attributes of the module that
called it. Transformations make that less simple than it sounds. `nnx.jit`, `filter_checkpoint` and
the like take a module apart and put a *twin* together inside, which is another object. So a module
that is not among the attributes of its caller by identity may be a part of a twin of the caller:
twins are found among the variables of the functions that are running. What a module cannot be found
in is named by its class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxtap._mark import Policy, leaf_name, marking
from jaxtap._scopes import Place, segment
from jaxtap._tap import Mark, tap

CONTAINERS = (list, tuple, dict)


class Adapter:
    """What jaxtap knows of a framework: what a module is, where it is, how its calls are seen."""

    package = ""
    """The top-level package of the framework, whose files are not the user's."""

    def is_module(self, value: Any) -> bool:
        """Whether a value is a module of this framework."""
        raise NotImplementedError

    def children(self, module: Any) -> Iterator[tuple[str, Any]]:
        """The attributes of a module that may be modules, or containers of some, by name.

        A name that is empty adds nothing to the path: it is that of something wrapped.
        """
        raise NotImplementedError

    def name(self, module: Any) -> str:
        """What to call a module that is in no other."""
        return type(module).__name__

    def is_opaque(self, value: Any) -> bool:
        """Whether a part of a result is an object of its own, whose arrays are not results."""
        return self.is_module(value)

    def seen(self) -> contextlib.AbstractContextManager[Any]:
        """Within, calls of modules are seen; afterwards the framework is as it was before."""
        raise NotImplementedError

    def opened(self, call: FunctionCall) -> contextlib.AbstractContextManager[FunctionCall]:
        """The call of a captured function with its stateful objects taken apart into arrays."""
        return contextlib.nullcontext(call)


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A function, its arguments, and what makes the result that the user sees of its own."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    close: Callable[[Any], Any] = lambda out: out

    @property
    def arguments(self) -> Any:
        """What of the call may hold arrays: the arguments, and a function that is a structure."""
        whole = jax.tree_util.all_leaves([self.fn])
        return self.args, self.kwargs, None if whole else self.fn

    def run(self, arguments: Any) -> Any:
        """Makes the call, on other arguments of the same structure."""
        args, kwargs, fn = arguments
        return (self.fn if fn is None else fn)(*args, **kwargs)


@dataclasses.dataclass(eq=False)
class _Running:
    """A module whose method is running, and the objects known to be twins of it."""

    adapter: Adapter
    module: Any
    frame: Any
    indexes: list[tuple[Any, str, dict[int, str]]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.adopt(self.module, "")

    def adopt(self, twin: Any, path: str) -> None:
        """Makes the modules in `twin` known, as those at `path`."""
        self.indexes.append((twin, path, index(self.adapter, twin)))

    def find(self, module: Any) -> str | None:
        """The path to a module from this one; None if it is not in it."""
        for _, prefix, found in self.indexes:
            path = found.get(id(module))
            if path is not None:
                return join(prefix, path)
        return None


class _Tracing(threading.local):
    """The modules that are running on this thread, outermost first, in one capture."""

    def __init__(self) -> None:
        self.running: list[_Running] = []
        self.frame: Any = None


_tracing = _Tracing()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Within, no module is running yet: a capture begins."""
    before = _tracing.running, _tracing.frame
    _tracing.running, _tracing.frame = [], sys._getframe(2)
    try:
        yield
    finally:
        _tracing.running, _tracing.frame = before


def called(
    adapter: Adapter, module: Any, method: str, run: Callable[[], Any], place: Place | None = None
) -> Any:
    """Runs a method of a module, within the module's scope; its result becomes a site.

    `place` is where the module is, if the framework knows.
    """
    here = marking()
    if here is None:
        return run()
    with within(adapter, module, place):
        out = run()
        admitted = here.admits(module, method)
        return _mark_result(adapter, module, method, admitted, out) if admitted else out


@contextlib.contextmanager
def within(adapter: Adapter, module: Any, place: Place | None = None) -> Iterator[None]:
    """The scope of a module; entering the one that is running already changes nothing."""
    place = locate(adapter, module) if place is None else place
    if not place:
        yield
        return
    running = _tracing.running
    # The frame of whoever entered this: two of contextlib's are between.
    running.append(_Running(adapter, module, sys._getframe(2)))
    try:
        with jax.named_scope(place):
            yield
    finally:
        running.pop()


def _mark_result(
    adapter: Adapter, module: Any, method: str, admitted: frozenset[Policy], out: Any
) -> Any:
    source = _user_line(adapter)
    suffix = "" if method == "__call__" else f".{method}"

    def leaf(keys: tuple[Any, ...], x: Any) -> Any:
        if not isinstance(x, (jax.Array, np.ndarray)):
            return x
        path = suffix + (f":{leaf_name(keys)}" if keys else "")
        fields = {"module": type(module), "method": method, "admitted": admitted}
        return tap(x, Mark(path, "module", source, **fields))

    return jax.tree_util.tree_map_with_path(leaf, out, is_leaf=adapter.is_opaque)


def running() -> list[_Running]:
    """The modules that are running on this thread, outermost first."""
    return _tracing.running


# --- where a module is ------------------------------------------------------------------------


def locate(adapter: Adapter, module: Any) -> Place:
    """The place of a module, from the module that is running; empty if it is that one."""
    if not _tracing.running:
        return _root(adapter, module)
    root = adapter.name(module)
    for up, around in enumerate(reversed(_tracing.running)):
        path = around.find(module)
        if path is not None:
            return Place(path, root, up)
    caller = _tracing.running[-1]
    owner, path = _owner(adapter, module, caller.frame)
    prefix = _twin_of(adapter, owner, caller)
    if prefix is None:
        return Place(join(adapter.name(owner), path), root)
    caller.adopt(owner, prefix)
    return Place(join(prefix, path), root)


def _root(adapter: Adapter, module: Any) -> Place:
    """The place of a module that no module calls, in the model that it is a part of."""
    owner, path = _owner(adapter, module, _tracing.frame)
    name = join(adapter.name(owner), path)
    return Place(name, name)


def _owner(adapter: Adapter, module: Any, until: Any) -> tuple[Any, str]:
    """The largest model that holds `module`, in the functions running since `until`; its path."""
    frame = sys._getframe(2)
    while frame is not None and frame is not until:
        owners = []
        for value in list(frame.f_locals.values()):
            for model in _models(adapter, value):
                found = index(adapter, model)
                path = found.get(id(module))
                if path:
                    owners.append((len(found), model, path))
        if owners:
            _, model, path = max(owners, key=lambda owner: owner[0])
            return model, path
        frame = frame.f_back
    return module, ""


def _models(adapter: Adapter, value: Any) -> Iterator[Any]:
    """The modules that a variable holds."""
    if adapter.is_module(value):
        yield value
    elif type(value) in CONTAINERS and len(value) <= 32:
        for part in value.values() if type(value) is dict else value:
            if adapter.is_module(part):
                yield part


def _twin_of(adapter: Adapter, twin: Any, caller: _Running) -> str | None:
    """The path of what `twin` is a copy of, from the module that is running; None if unclear."""
    if caller.adapter is not adapter:
        return None
    kind = _kind(adapter, twin)
    if kind == _kind(adapter, caller.module):
        return ""
    alike = [
        path
        for path, module in _descendants(adapter, caller.module)
        if type(module) is type(twin) and _kind(adapter, module) == kind
    ]
    return alike[0] if len(alike) == 1 else None


def _kind(adapter: Adapter, module: Any) -> Any:
    """What two modules have in common if one is a copy of the other: the classes in them."""
    parts = [(path, type(part)) for path, part in _descendants(adapter, module)]
    return type(module), tuple(parts)


def index(adapter: Adapter, module: Any) -> dict[int, str]:
    """The paths of a module and of all that are in it, by identity."""
    found = {id(module): ""}
    for path, part in _descendants(adapter, module):
        found.setdefault(id(part), path)
    return found


def _descendants(adapter: Adapter, module: Any) -> Iterator[tuple[str, Any]]:
    """The modules in a module with their paths, those nearest to it first, each once."""
    seen = {id(module)}
    level = [("", module)]
    while level:
        deeper = []
        for path, value in level:
            for name, child in _parts(adapter, value):
                if id(child) in seen:
                    continue
                seen.add(id(child))
                below = join(path, name), child
                deeper.append(below)
                if adapter.is_module(child):
                    yield below
        level = deeper


def _parts(adapter: Adapter, value: Any) -> Iterator[tuple[str, Any]]:
    if adapter.is_module(value):
        parts = adapter.children(value)
    elif isinstance(value, dict):
        parts = ((segment(key), part) for key, part in value.items())
    else:
        parts = ((str(i), part) for i, part in enumerate(value))
    for name, part in parts:
        if adapter.is_module(part) or isinstance(part, CONTAINERS):
            yield name, part


def join(path: str, name: str) -> str:
    """Two paths as one, where either may be empty."""
    return f"{path}/{name}" if path and name else path or name


def _user_line(adapter: Adapter) -> str:
    """`file:line` of the user's code that called a module."""
    ours = ("jaxtap", "jax", adapter.package)
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ours and package not in ("contextlib", "functools"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
