"""Modules: their calls, seen while a program is traced, and the names of those calls.

An adapter calls `called` for every method of a module that runs. The result becomes a site, named
by where the module is in the model: `GPT/blocks/3/attn`, `GPT/encoder.encode`.

Where a module is comes from the call stack: it is looked for in the attributes of the module that
called it. Transformations make that less simple than it sounds. `nnx.jit`, `filter_checkpoint` and
the like take a module apart and put a *twin* together inside, which is another object. So a module
that is not among the attributes of its caller by identity may be a part of a twin: twins are found
among the variables of the functions that are running, and recognised by the classes in them. If one
may be a copy of several modules, its arrays tell which: see `_anchors`. A module that cannot be
found anywhere is named by its class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxtap._anchors import anchor, leaf_path
from jaxtap._mark import leaf_name, marking
from jaxtap._scopes import Place, join, segment
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

    def state(self, module: Any) -> Any:
        """The arrays of a module, in a structure with the names of its attributes as keys."""
        return module

    def wraps(self, value: Any) -> bool:
        """Whether a value is no module, but something of the framework's around one."""
        return False

    def listing(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, type]] | None:
        """The paths and classes of the modules of a model; None if it is not of this framework.

        `args` and `kwargs` are what to call it with, where its modules come to be by a call.
        """
        del args, kwargs
        if not self.is_module(model):
            return None
        name, parts = self.name(model), in_order(self, model)
        return [(join(name, path), type(part)) for path, part in parts if self.has_site(part)]

    def has_site(self, module: Any) -> bool:
        """Whether what a module returns is a site: a container of modules returns nothing."""
        return callable(module)

    def is_opaque(self, value: Any) -> bool:
        """Whether a part of a result is an object of its own, whose arrays are not results."""
        return self.is_module(value)

    def seen(self) -> contextlib.AbstractContextManager[Any]:
        """Within, calls of modules are seen; afterwards the framework is as it was before."""
        raise NotImplementedError

    def traced(self, trace: Callable[[], Any]) -> Any:
        """Traces a program, and once more in another way if the first fails and may have to."""
        return trace()

    def lasting(self, fn: Any) -> bool:
        """Whether equal arguments, and equal state, mean equal calls of a function.

        They do if it is a module; or if it is jitted by the framework, and so keeps what it closes
        over.
        """
        return False

    def keeps_numbers(self, call: FunctionCall) -> Callable[[Any], bool] | None:
        """Tells the parts of a call's arguments in which Python numbers are static."""
        return None

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
    memory: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """What adapters have learned of the function, from one call to the next."""

    @property
    def arguments(self) -> Any:
        """What of the call may hold arrays: the arguments, and a function that is a structure."""
        whole = jax.tree_util.all_leaves([self.fn])
        return self.args, self.kwargs, None if whole else self.fn

    def run(self, arguments: Any) -> Any:
        """Makes the call, on other arguments of the same structure."""
        args, kwargs, fn = arguments
        return (self.fn if fn is None else fn)(*args, **kwargs)


class Reopen(Exception):
    """Raised when a call that is being traced must be taken apart anew: there is more state."""


@dataclasses.dataclass(eq=False)
class _Running:
    """A module whose method is running, and the objects known to be twins of it."""

    adapter: Adapter
    module: Any
    frame: Any
    root: str

    @functools.cached_property
    def _indexes(self) -> list[tuple[Any, str, dict[int, str]]]:
        # Most modules call no other, so that nothing is ever looked for in them.
        return [(self.module, "", index(self.adapter, self.module))]

    def adopt(self, twin: Any, path: str) -> None:
        """Makes the modules in `twin` known, as those at `path`."""
        self._indexes.append((twin, path, index(self.adapter, twin)))

    def find(self, module: Any) -> str | None:
        """The path to a module from this one; None if it is not in it."""
        if module is self.module:
            return ""
        for _, prefix, found in self._indexes:
            path = found.get(id(module))
            if path is not None:
                return join(prefix, path)
        return None


class _Tracing(threading.local):
    """The modules that are running on this thread, outermost first, in one capture."""

    def __init__(self) -> None:
        self.running: list[_Running] = []
        self.frame: Any = None
        self.outer: list[_Running] = []  # in the captures around this one


_tracing = _Tracing()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Within, no module is running yet: a capture begins."""
    before = _tracing.running, _tracing.frame, _tracing.outer
    around = [*_tracing.outer, *_tracing.running]
    _tracing.running, _tracing.frame, _tracing.outer = [], sys._getframe(2), around
    try:
        yield
    finally:
        _tracing.running, _tracing.frame, _tracing.outer = before


def called(
    adapter: Adapter, module: Any, method: str, run: Callable[[], Any], place: Place | None = None
) -> Any:
    """Runs a method of a module, within the module's scope; its result becomes a site.

    `place` is where the module is, if the framework knows.
    """
    if marking() is None:
        return run()
    with within(adapter, module, place):
        return mark_result(adapter, module, method, run())


@contextlib.contextmanager
def within(adapter: Adapter, module: Any, place: Place | None = None) -> Iterator[None]:
    """The scope of a module; entering the one that is running already changes nothing."""
    place = _rooted(locate(adapter, module) if place is None else place)
    if not place and not place.up:
        yield
        return
    before = _tracing.running
    around = before[: len(before) - place.up]
    # The frame of whoever entered this: two of contextlib's are between.
    entered = [_Running(adapter, module, sys._getframe(2), place.root)] if place else []
    _tracing.running = [*around, *entered]
    try:
        with jax.named_scope(place):
            yield
    finally:
        _tracing.running = before


def _rooted(place: Place) -> Place:
    """The place of the first module in a capture within another, of the same model.

    It is named from the root of the model. So the modules that the outer capture sees around it are
    left, lest it has the root in its name twice.
    """
    outer = [] if _tracing.running else _tracing.outer
    if not outer or place.anchor is not None or place.up:
        return place
    model = place.root.partition("/")[0]
    same = outer[0].root.partition("/")[0] == model
    return Place(place, place.root, len(outer)) if same else place


def mark_result(adapter: Adapter, module: Any, method: str, out: Any) -> Any:
    """Makes what a method of a module returned a site, if a capture admits it; returns it."""
    here = marking()
    admitted = here.admits(module, method) if here is not None else frozenset()
    if not admitted:
        return out
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
    found = _known(adapter, module)
    if found is not None:
        return found
    caller = _tracing.running[-1]
    owner, path = _owner(adapter, module, caller.frame)
    paths = _copied(adapter, owner, caller.module) if caller.adapter is adapter else {}
    if "" in paths:
        caller.adopt(owner, "")
        return Place(path, adapter.name(module))
    return _undecided(adapter, owner, paths, caller.adapter.name(caller.module), path)


def find(adapter: Adapter, part: Any) -> Place | None:
    """The place of a part of a model, be it a module or what is around one; None if of none."""
    if not _tracing.running:
        owner, path = _owner(adapter, part, _tracing.frame)
        name = join(adapter.name(owner), path)
        return Place(name, name) if path else None
    found = _known(adapter, part)
    if found is not None:
        return found
    caller = _tracing.running[-1]
    owner, path = _owner(adapter, part, caller.frame)
    if caller.adapter is adapter and "" in _copied(adapter, owner, caller.module):
        caller.adopt(owner, "")
        return Place(path, adapter.name(part))
    return None


def _known(adapter: Adapter, part: Any) -> Place | None:
    for up, around in enumerate(reversed(_tracing.running)):
        path = around.find(part)
        if path is not None:
            return Place(path, adapter.name(part), up)
    return None


def _root(adapter: Adapter, module: Any) -> Place:
    """The place of a module that no module calls, in the model that it is a part of."""
    owner, path = _owner(adapter, module, _tracing.frame)
    if not path:
        models = {id(model): model for model in _models_running(adapter, _tracing.frame)}
        copies = [(model, _copied(adapter, owner, model)) for model in models.values()]
        model, paths = max(copies, key=lambda found: len(found[1]), default=(None, {}))
        if paths and "" not in paths:
            return _undecided(adapter, owner, paths, adapter.name(model), path)
    name = join(adapter.name(owner), path)
    return Place(name, name)


def _undecided(adapter: Adapter, owner: Any, paths: dict[str, Any], model: str, tail: str) -> Place:
    """The place of a module in a copy of another, whose arrays will tell which that is."""
    name = join(adapter.name(owner), tail)
    for leaf, x in _arrays(adapter, owner):
        same = [p for p, part in paths.items() if dict(_arrays(adapter, part)).get(leaf) is x]
        if len(same) == 1:
            path = join(same[0], tail)
            return Place(path, join(model, path))
    for leaf, x in _arrays(adapter, owner):
        if isinstance(x, jax.core.Tracer):
            arrays = [dict(_arrays(adapter, part)).get(leaf) for part in paths.values()]
            uid = anchor(x, tuple(paths), leaf, arrays)
            return Place(name, name, anchor=uid, model=model, tail=tail)
    return Place(name, name)


def _arrays(adapter: Adapter, module: Any) -> Iterator[tuple[str, Any]]:
    """The arrays in a module, and their paths."""
    for keys, x in jax.tree_util.tree_leaves_with_path(adapter.state(module)):
        if isinstance(x, jax.Array):
            yield leaf_path(keys), x


def _owner(adapter: Adapter, module: Any, until: Any) -> tuple[Any, str]:
    """The largest model that holds `module`, in the functions running since `until`; its path."""
    frame = sys._getframe(2)
    # One model is in the variables of many functions.
    indexes: dict[int, tuple[Any, dict[int, str]]] = {}
    while frame is not None and frame is not until:
        owners = []
        for value in _variables(frame):
            for model in _models(adapter, value):
                if id(model) not in indexes:
                    indexes[id(model)] = model, index(adapter, model)
                found = indexes[id(model)][1]
                path = found.get(id(module))
                if path:
                    owners.append((len(found), model, path))
        if owners:
            _, model, path = max(owners, key=lambda owner: owner[0])
            return model, path
        frame = frame.f_back
    return module, ""


def _models_running(adapter: Adapter, until: Any) -> Iterator[Any]:
    """The modules in the variables of the functions running since `until`, innermost first."""
    frame = sys._getframe(3)
    while frame is not None and frame is not until:
        for value in _variables(frame):
            yield from _models(adapter, value)
        frame = frame.f_back


def _variables(frame: Any) -> list[Any]:
    """The values of the variables of a running function: local, closed over, and global."""
    used = (frame.f_globals.get(name) for name in frame.f_code.co_names)
    return [*frame.f_locals.values(), *used]


def _models(adapter: Adapter, value: Any) -> Iterator[Any]:
    """The modules that a variable holds."""
    if adapter.is_module(value):
        yield value
    elif type(value) in CONTAINERS and len(value) <= 32:
        for part in value.values() if type(value) is dict else value:
            if adapter.is_module(part):
                yield part


def _copied(adapter: Adapter, twin: Any, model: Any) -> dict[str, Any]:
    """The modules in a model that `twin` may be a copy of, by their paths."""
    kind = _kind(adapter, twin)
    if kind == _kind(adapter, model):
        return {"": model}
    return {
        path: module
        for path, module in _descendants(adapter, model)
        if type(module) is type(twin) and _kind(adapter, module) == kind
    }


def _kind(adapter: Adapter, module: Any) -> Any:
    """What two modules have in common if one is a copy of the other: the classes in them."""
    parts = [(path, type(part)) for path, part in _descendants(adapter, module)]
    return type(module), tuple(parts)


def index(adapter: Adapter, module: Any) -> dict[int, str]:
    """The paths of a module and of all that are in it, wrapped or not, by identity."""
    found = {id(module): ""}
    for path, part in _nodes(adapter, module):
        found.setdefault(id(part), path)
    return found


def _descendants(adapter: Adapter, module: Any) -> Iterator[tuple[str, Any]]:
    """The modules in a module with their paths, those nearest to it first, each once."""
    return (found for found in _nodes(adapter, module) if adapter.is_module(found[1]))


def _nodes(adapter: Adapter, module: Any) -> Iterator[tuple[str, Any]]:
    """The same with what is around some of them."""
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
                if adapter.is_module(child) or adapter.wraps(child):
                    yield below
        level = deeper


def in_order(adapter: Adapter, model: Any) -> Iterator[tuple[str, Any]]:
    """A module and all that are in it, each once, in the order of their attributes."""
    paths = index(adapter, model)

    def below(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if adapter.is_module(value):
            if paths.get(id(value)) != path:
                return
            yield path, value
        for name, part in _parts(adapter, value):
            yield from below(join(path, name), part)

    return below("", model)


def _parts(adapter: Adapter, value: Any) -> Iterator[tuple[str, Any]]:
    if adapter.is_module(value) or adapter.wraps(value):
        parts = adapter.children(value)
    elif isinstance(value, dict):
        parts = ((segment(key), part) for key, part in value.items())
    else:
        parts = ((str(i), part) for i, part in enumerate(value))
    for name, part in parts:
        if adapter.is_module(part) or adapter.wraps(part) or isinstance(part, CONTAINERS):
            yield name, part


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
