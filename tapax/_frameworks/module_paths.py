"""Where a module is, which is what it is called.

It comes from the call stack: a module is looked for in the attributes of the module that called it.
Transformations make that less simple than it sounds. `nnx.jit`, `filter_checkpoint` and the like
take a module apart and put a *twin* together inside, which is another object. So a module that is
not among the attributes of its caller by identity may be a part of a twin: twins are found among
the variables of the functions that are running, and recognised by the classes in them. If one may
be a copy of several modules, its arrays tell which: see `_frameworks.anchors`. A module that cannot
be found anywhere is named by its class.
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

from tapax._frameworks.anchors import Anchor, RootAnchor, anchor, anchor_root, constant_arrays
from tapax._frameworks.held_models import HeldModels
from tapax._frameworks.interface import Adapter, Module
from tapax._frameworks.module_tree import CONTAINERS, arrays, descendants, index, is_slice, kind
from tapax._jax import PyTree
from tapax._marks.scopes import ModuleScope
from tapax._sites import join


@dataclasses.dataclass(eq=False)
class RunningModule:
    """A module whose method is running, and the objects known to be twins of it."""

    adapter: Adapter
    module: Any
    frame: Any
    root: str

    @functools.cached_property
    def _indexes(self) -> list[tuple[Any, str, dict[int, str]]]:
        # Most modules call no other, so that nothing is ever looked for in them.
        return [(self.module, "", index(self.adapter, self.module))]

    def adopt(self, twin: Module, path: str) -> None:
        """Makes the modules in `twin` known, as those at `path`."""
        self._indexes.append((twin, path, index(self.adapter, twin)))

    def find(self, module: Module) -> str | None:
        """The path to a module from this one; None if it is not in it."""
        if module is self.module:
            return ""
        for _, prefix, found in self._indexes:
            path = found.get(id(module))
            if path is not None:
                return join(prefix, path)
        return None


class _CallStack(threading.local):
    """The modules that are running on this thread, outermost first, in one capture."""

    def __init__(self) -> None:
        self.running: list[RunningModule] = []
        self.frame: Any = None
        self.outer: list[RunningModule] = []  # in the captures around this one


_stack = _CallStack()


@contextlib.contextmanager
def new_call_stack() -> Iterator[None]:
    """Within, no module is running yet: a capture begins."""
    before = _stack.running, _stack.frame, _stack.outer
    around = [*_stack.outer, *_stack.running]
    _stack.running, _stack.frame, _stack.outer = [], sys._getframe(2), around
    try:
        yield
    finally:
        _stack.running, _stack.frame, _stack.outer = before


def running_modules() -> list[RunningModule]:
    """The modules that are running on this thread, outermost first."""
    return _stack.running


@contextlib.contextmanager
def enter_module(module: RunningModule | None, up: int) -> Iterator[None]:
    """Within, a module is running that another calls, or one `up` from that."""
    before = _stack.running
    around = before[: len(before) - up]
    _stack.running = around if module is None else [*around, module]
    try:
        yield
    finally:
        _stack.running = before


def rooted(place: ModuleScope) -> ModuleScope:
    """The place of the first module in a capture within another, of the same model.

    It is named from the root of the model. So the modules that the outer capture sees around it are
    left, lest it has the root in its name twice.
    """
    outer = [] if _stack.running else _stack.outer
    if not outer or place.up:
        return place
    model = place.root.partition("/")[0]
    same = outer[0].root.partition("/")[0] == model
    return place.out_of(len(outer)) if same else place


def place_of_named(adapter: Adapter, module: Module) -> ModuleScope:
    """The place of a module whose name is its whole path, from the module that is running."""
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
    """The place of a module, from the module that is running; empty if it is that one."""
    if not _stack.running:
        return _root(adapter, module)
    found = _known(adapter, module)
    if found is not None:
        return found
    caller = _stack.running[-1]
    owner, path = _owner(adapter, module, caller.frame)
    for above, around in enumerate(reversed(_stack.running)):
        paths = _copied(adapter, owner, around.module) if around.adapter is adapter else {}
        if "" in paths and around is caller:
            caller.adopt(owner, "")
            return ModuleScope(path, adapter.name(module))
        if paths and "" not in paths:
            return _undecided(adapter, owner, paths, adapter.name(around.module), path, above)
    name = join(adapter.name(owner), path)
    return ModuleScope(name, name)


def find(adapter: Adapter, part: Any) -> ModuleScope | None:
    """The place of a part of a model, be it a module or what is around one; None if of none."""
    if not _stack.running:
        owner, path = _owner(adapter, part, _stack.frame)
        return _in_root(adapter, owner, path) if path else None
    found = _known(adapter, part)
    if found is not None:
        return found
    caller = _stack.running[-1]
    owner, path = _owner(adapter, part, caller.frame)
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
    """The place of a module that no module calls, in the model that it is a part of."""
    return _in_root(adapter, *_owner(adapter, module, _stack.frame))


def _in_root(adapter: Adapter, owner: Module, path: str) -> ModuleScope:
    """The place of a module in its model, whose arrays will tell which of several models it is."""
    found = [*arrays(adapter, owner)]
    whole = ("", None) if path or not found else _whole(adapter, owner, found[0][0])
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
    """The place of a module in a model that no module calls, by its path from the model's class.

    `found` are the arrays of the model, perhaps in a `collection`; `part` says of which modules in
    a model of the name `whole` it may be a copy.
    """
    ends = [found[0], found[-1]] if found else []  # two models may well share some
    leaves, xs = tuple(leaf for leaf, _ in ends), [x for _, x in ends]
    held = HeldModels.of(adapter, model, _stack.frame, leaves[0] if leaves else None)
    name, _, tail = path.partition("/")
    made = RootAnchor(name, leaves, held.holder, held.constants, whole, part, collection)
    return ModuleScope(path, path, anchor=anchor_root(made, xs), tail=tail)


def _whole(adapter: Adapter, module: Module, leaf: str) -> tuple[str, Anchor | None]:
    """The name of the model of which a module may be a copy of a part, and the places of those."""
    found = itertools.chain.from_iterable(_models_running(adapter, _stack.frame))
    models = {id(model): model for model in found}
    copies = [(model, _copied(adapter, module, model)) for model in models.values()]
    parts = [(model, paths) for model, paths in copies if paths and "" not in paths]
    if not parts:
        return "", None
    model, paths = max(parts, key=lambda found: len(found[1]))
    others = [dict(arrays(adapter, part)).get(leaf) for part in paths.values()]
    return adapter.name(model), Anchor(tuple(paths), leaf, constant_arrays(others))


def _undecided(
    adapter: Adapter, owner: Any, paths: dict[str, Any], model: str, tail: str, above: int
) -> ModuleScope:
    """The place of a module in a copy of another, whose arrays will tell which that is."""
    name = join(adapter.name(owner), tail)
    for leaf, x in arrays(adapter, owner):
        same = [p for p, part in paths.items() if dict(arrays(adapter, part)).get(leaf) is x]
        if len(same) == 1:
            path = join(same[0], tail)
            return ModuleScope(path, join(model, path), above)
    stacks = [p for p, part in paths.items() if is_slice(adapter, owner, part)]
    if len(stacks) == 1:
        path = join(stacks[0], tail)
        return ModuleScope(path, join(model, path), above)
    for leaf, x in arrays(adapter, owner):
        if isinstance(x, Tracer):
            others = [dict(arrays(adapter, part)).get(leaf) for part in paths.values()]
            uid = anchor(x, tuple(paths), leaf, others)
            return ModuleScope(name, name, anchor=uid, model=model, tail=tail, above=above)
    return ModuleScope(name, name)


def _owner(adapter: Adapter, module: Module, until: Any) -> tuple[Any, str]:
    """The largest model that holds `module`, in the functions running since `until`; its path."""
    # One model is in the variables of many functions.
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
    """The modules in the variables of each function running since `until`, innermost first.

    Variables are local, closed over, and global. Functions of JAX are left out: before Python 3.13,
    a frame keeps the values of variables that were looked at, and so JAX's own tracers.
    """
    frame = sys._getframe(3)
    while frame is not None and frame is not until:
        if frame.f_globals.get("__name__", "").partition(".")[0] != "jax":
            used = (frame.f_globals.get(name) for name in frame.f_code.co_names)
            values = [*frame.f_locals.values(), *used]
            yield [model for value in values for model in _models(adapter, value)]
        frame = frame.f_back


def _models(adapter: Adapter, value: PyTree) -> Iterator[Any]:
    """The modules that a variable holds."""
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
    """The modules in a model that `twin` may be a copy of, by their paths."""
    wanted = kind(adapter, twin)
    if wanted == kind(adapter, model):
        return {"": model}
    return {
        path: module
        for path, module in descendants(adapter, model)
        if type(module) is type(twin) and kind(adapter, module) == wanted
    }
