"""Module paths, found on the call stack.

tapax searches for a module in the attributes of the module that called it. Transformations such as
`nnx.jit` and `filter_checkpoint` complicate this search: they flatten a module and build a *twin*
inside, which is another object. So a module that is not among the attributes of its caller by
identity may be part of a twin. tapax searches for twins among the variables of the running
functions, and recognises them by the classes in them. If a twin may be a copy of several modules,
its arrays tell which: see `_frameworks.anchors`. A module that is found nowhere is named by its
class.
"""

import contextlib
import dataclasses
import functools
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from jax.core import Tracer

from tapax._frameworks.anchors import Anchor, RootAnchor, bind_anchor
from tapax._frameworks.interface import Adapter, Module
from tapax._frameworks.model_variables import ModelVariables, is_being_made
from tapax._frameworks.module_tree import CONTAINERS, arrays, descendants, index, is_slice, kind
from tapax._jax import PyTree
from tapax._marks.scopes import ModuleScope
from tapax._sites import join


@dataclasses.dataclass(eq=False)
class RunningModule:
    """A module whose method is running, and its known twins."""

    adapter: Adapter
    module: Any
    frame: Any
    root: str

    @functools.cached_property
    def _indexes(self) -> list[tuple[Any, str, dict[int, str]]]:
        # Build the index lazily: most modules call no other, so no search visits them.
        return [(self.module, "", index(self.adapter, self.module))]

    def adopt(self, twin: Module, path: str) -> None:
        """Register the modules in `twin`, a twin of the module at `path`."""
        self._indexes.append((twin, path, index(self.adapter, twin)))

    def find(self, module: Module) -> str | None:
        """Return the path of a module in this one; None if it is not part of it."""
        if module is self.module:
            return ""
        for _, prefix, found in self._indexes:
            path = found.get(id(module))
            if path is not None:
                return join(prefix, path)
        return None


class _CallStack(threading.local):
    """The modules that are running on this thread in one capture, outermost first."""

    def __init__(self) -> None:
        self.running: list[RunningModule] = []
        self.frame: Any = None
        self.outer: list[RunningModule] = []  # running in the captures around this one
        self.parts: list[tuple[Any, str, dict[int, str], Any]] = []


_stack = _CallStack()


@contextlib.contextmanager
def new_call_stack() -> Iterator[None]:
    """Begin a capture, in which no module is running yet."""
    before = _stack.running, _stack.frame, _stack.outer, _stack.parts
    around = [*_stack.outer, *_stack.running]
    _stack.running, _stack.frame, _stack.outer, _stack.parts = [], sys._getframe(2), around, []
    try:
        yield
    finally:
        _stack.running, _stack.frame, _stack.outer, _stack.parts = before


def adopt_part(adapter: Adapter, model: Module, part: Any, path: str) -> None:
    """Register the modules in `part` as those at `path` of a model that is not running."""
    _stack.parts.append((model, path, index(adapter, part), part))


def running_modules() -> list[RunningModule]:
    """Return the modules that are running on this thread, outermost first."""
    return _stack.running


@contextlib.contextmanager
def enter_module(module: RunningModule | None, up: int) -> Iterator[None]:
    """Enter a module that the running module, or the one `up` levels above, calls."""
    before = _stack.running
    around = before[: len(before) - up]
    _stack.running = around if module is None else [*around, module]
    try:
        yield
    finally:
        _stack.running = before


def rooted(scope: ModuleScope) -> ModuleScope:
    """Adjust the scope of the first module in a capture inside another capture of one model.

    The module is named from the root of the model, so its scope leaves the modules that the outer
    capture sees around it. Otherwise its name would contain the root twice.
    """
    outer = [] if _stack.running else _stack.outer
    if not outer or scope.up:
        return scope
    model = scope.root.partition("/")[0]
    same = outer[0].root.partition("/")[0] == model
    return scope.out_of(len(outer)) if same else scope


def scope_of_named(adapter: Adapter, module: Module) -> ModuleScope:
    """Return the scope, relative to the running module, of a module whose name is its full path."""
    path, up = adapter.name(module), 0
    for around in reversed(_stack.running):
        if around.adapter is not adapter:
            break
        outer = adapter.name(around.module)
        if f"{path}/".startswith(f"{outer}/"):
            return ModuleScope(path[len(outer) + 1 :], path, up)
        up += 1
    return ModuleScope(path, path, up)


def locate(adapter: Adapter, module: Module) -> ModuleScope:
    """Return the scope of a module relative to the running module; empty if it is that module."""
    if not _stack.running:
        return _root(adapter, module)
    found = _known(adapter, module)
    if found is not None:
        return found
    caller = _stack.running[-1]
    owner, path = _owner(adapter, module, caller.frame)
    if is_being_made(owner, caller.frame):
        return _in_class(adapter, owner, path)
    for above, around in enumerate(reversed(_stack.running)):
        paths = _copied(adapter, owner, around.module) if around.adapter is adapter else {}
        if "" in paths and around is caller:
            caller.adopt(owner, "")
            return ModuleScope(path, adapter.name(module))
        if paths and "" not in paths:
            return _undecided(adapter, owner, paths, adapter.name(around.module), path, above)
    return _in_class(adapter, owner, path)


def _in_class(adapter: Adapter, owner: Module, path: str) -> ModuleScope:
    """Return the scope of a module in an owner that is known by its class alone."""
    name = join(adapter.name(owner), path)
    return ModuleScope(name, name)


def find(adapter: Adapter, part: Any) -> ModuleScope | None:
    """Return the scope of a module or wrapper in a model; None if no model contains it."""
    if not _stack.running:
        owner, path = _owner(adapter, part, _stack.frame)
        return _in_root(adapter, owner, path) if path else None
    found = _known(adapter, part)
    if found is not None:
        return found
    caller = _stack.running[-1]
    owner, path = _owner(adapter, part, caller.frame)
    if path and is_being_made(owner, caller.frame):
        return _in_class(adapter, owner, path)
    if caller.adapter is adapter and "" in _copied(adapter, owner, caller.module):
        caller.adopt(owner, "")
        return ModuleScope(path, adapter.name(part))
    return None


def _known(adapter: Adapter, part: Any) -> ModuleScope | None:
    for up, around in enumerate(reversed(_stack.running)):
        path = around.find(part)
        if path is not None:
            return ModuleScope(path, adapter.name(part), up)
    return None


def _root(adapter: Adapter, module: Module) -> ModuleScope:
    """Return the scope of a module that no module calls, in the model that contains it."""
    return _in_root(adapter, *_owner(adapter, module, _stack.frame))


def _in_root(adapter: Adapter, owner: Module, path: str) -> ModuleScope:
    """Return the scope of a module in `owner`, with an anchor that tells several models apart."""
    if is_being_made(owner, _stack.frame):
        return _in_class(adapter, owner, path)
    found = [*arrays(adapter, owner)]
    whole = ("", None) if path or not found else _whole(adapter, owner, [leaf for leaf, _ in found])
    return anchored_root(adapter, owner, join(adapter.name(owner), path), found, *whole)


def anchored_root(
    adapter: Adapter,
    model: Module,
    path: str,
    found: Sequence[tuple[str, Any]],
    whole: str = "",
    part: Anchor | None = None,
    collection: str = "",
) -> ModuleScope:
    """Return the scope of a module in a root, by its `path` from the class of the model.

    `found` are the arrays of the model, perhaps in a `collection`. `part` has the modules, in a
    model named `whole`, of which the root may be a copy.
    """
    leaves, xs = tuple(leaf for leaf, _ in found), [x for _, x in found]
    variables = ModelVariables.of(adapter, model, _stack.frame, leaves[0] if leaves else None)
    name, _, tail = path.partition("/")
    known = variables.holder, variables.constants
    made = RootAnchor(name, leaves, *known, whole, part, collection)
    return ModuleScope(path, path, anchor=bind_anchor(made, xs), tail=tail)


def _whole(adapter: Adapter, module: Module, leaves: Sequence[str]) -> tuple[str, Anchor | None]:
    """Find a model with parts of which a module may be a copy; return its name and an anchor."""
    found = itertools.chain.from_iterable(_models_running(adapter, _stack.frame))
    models = {id(model): model for model in found}
    copies = [(model, _copied(adapter, module, model)) for model in models.values()]
    parts = [(model, paths) for model, paths in copies if paths and "" not in paths]
    if not parts:
        return "", None
    model, paths = max(parts, key=lambda found: len(found[1]))
    return adapter.name(model), Anchor.of(leaves, _arrays_of_each(adapter, paths))


def _arrays_of_each(adapter: Adapter, paths: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {path: dict(arrays(adapter, part)) for path, part in paths.items()}


def _undecided(
    adapter: Adapter, owner: Any, paths: dict[str, Any], model: str, tail: str, above: int
) -> ModuleScope:
    """Return the scope of a module in a twin, by the arrays of the twin or by an anchor."""
    name = join(adapter.name(owner), tail)
    found, modules = dict(arrays(adapter, owner)), _arrays_of_each(adapter, paths)
    for leaf, x in found.items():
        same = [p for p, others in modules.items() if others.get(leaf) is x]
        if len(same) == 1:
            path = join(same[0], tail)
            return ModuleScope(path, join(model, path), above)
    stacks = [p for p, part in paths.items() if is_slice(adapter, owner, part)]
    if len(stacks) == 1:
        path = join(stacks[0], tail)
        return ModuleScope(path, join(model, path), above)
    traced = {leaf: x for leaf, x in found.items() if isinstance(x, Tracer)}
    if not traced:
        return ModuleScope(name, name)
    uid = bind_anchor(Anchor.of([*traced], modules), [*traced.values()])
    return ModuleScope(name, name, anchor=uid, model=model, tail=tail, above=above)


def _owner(adapter: Adapter, module: Module, until: Any) -> tuple[Any, str]:
    """Find the largest model with `module` in the functions running since `until`; return both."""
    for model, path, known, _ in _stack.parts:
        if id(module) in known:
            return model, join(path, known[id(module)])
    # Many functions have variables for one model.
    indexes: dict[int, tuple[Any, dict[int, str]]] = {}
    for models in _models_running(adapter, until):
        owners = []
        for model in models:
            if id(model) not in indexes:
                indexes[id(model)] = model, index(adapter, model)
            found = indexes[id(model)][1]
            path = found.get(id(module))
            if path:
                owners.append((len(found), model, path))
        if owners:
            _, model, path = max(owners, key=lambda owner: owner[0])
            return model, path
    return module, ""


def _models_running(adapter: Adapter, until: Any) -> Iterator[list[Any]]:
    """Yield the modules in the variables of each function running since `until`, innermost first.

    Variables are local, closed over, and global. Functions of JAX are left out: before Python 3.13,
    reading the variables of a frame keeps their values alive, and so the tracers of JAX.
    """
    frame = sys._getframe(3)
    while frame is not None and frame is not until:
        if frame.f_globals.get("__name__", "").partition(".")[0] != "jax":
            used = (frame.f_globals.get(name) for name in frame.f_code.co_names)
            values = [*frame.f_locals.values(), *used]
            yield [model for value in values for model in _models(adapter, value)]
        frame = frame.f_back


def _models(adapter: Adapter, value: PyTree) -> Iterator[Any]:
    """Yield the modules in the value of a variable."""
    if adapter.is_module(value):
        yield value
    elif adapter.wraps(value):
        yield from (part for _, part in descendants(adapter, value))
    elif type(value) in CONTAINERS and len(value) <= 32:
        for part in value.values() if type(value) is dict else value:
            if adapter.is_module(part):
                yield part
            elif adapter.wraps(part):
                yield from (inner for _, inner in descendants(adapter, part))


def _copied(adapter: Adapter, twin: Module, model: Module) -> dict[str, Any]:
    """Return the modules in a model of which `twin` may be a copy, by path."""
    wanted = kind(adapter, twin)
    if wanted == kind(adapter, model):
        return {"": model}
    return {
        path: module
        for path, module in descendants(adapter, model)
        if type(module) is type(twin) and kind(adapter, module) == wanted
    }
