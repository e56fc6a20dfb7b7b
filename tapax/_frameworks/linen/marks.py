"""The marks of Linen, `self.sow` and `self.perturb`.

They are sites, whether or not their collection is mutable, and Linen stores their values as usual.
Within `recording`, which `tapax.compat.linen` uses, marks carry the facts about their values,
selected methods sow their results, and Linen stores nothing itself.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from flax.linen import module as _module

from tapax._frameworks.flax_reducers import find_container
from tapax._frameworks.interface import Module
from tapax._frameworks.module_calls import within
from tapax._jax import Function, PyTree
from tapax._marks.context import ContextVariable, active_policy
from tapax._marks.sow import SownValue, mark
from tapax._sites import segment

# The trace depends on this variable, so it is part of the key of every `jit` cache.
_recording = ContextVariable[Any](None)


@dataclasses.dataclass(frozen=True)
class LinenSownValue(SownValue):
    """The sown or perturbed value of a module at some `depth`, of which a site is a leaf.

    `calls` is the type of the container of all calls; None if the calls are folded into one.
    """

    collection: str
    name: str
    depth: int
    calls: type | None = tuple


@dataclasses.dataclass(frozen=True)
class LinenRecordOptions:
    """The options of a recording of one `apply`: the collections and method results to record.

    `perturbed` are the collections of perturbations. Options with equal `key`s record the same
    values.
    """

    is_mutable: Callable[[str], bool] = dataclasses.field(compare=False)
    outputs: Callable[[Any, str], bool] | None = dataclasses.field(compare=False)
    perturbed: frozenset[str]
    key: Hashable


class _Roots(threading.local):
    """The root scope of the `apply` that is recorded on this thread."""

    recorded: Any = None


_roots = _Roots()


@contextlib.contextmanager
def recording(what: LinenRecordOptions, root: Any) -> Iterator[None]:
    """Record the marks in the `apply` of a root scope as `LinenSownValue`s within the context."""
    before, _roots.recorded = _roots.recorded, root
    try:
        with _recording(what):
            yield
    finally:
        _roots.recorded = before


def _recorded(module: Module) -> LinenRecordOptions | None:
    """Return the recording options for a module; None if it runs in an `apply` inside that one."""
    root = module.scope.root
    return _recording.value if root.debug_path or root == _roots.recorded else None


def record_result(module: Module, method: str, out: PyTree) -> None:
    """Sow the result of a method, if it is to be recorded."""
    what = _recorded(module) if module.scope is not None else None
    if what is not None and what.outputs is not None and what.outputs(module, method):
        mark(out, method, "sow", collection=_sown(module, "intermediates", method))


def _sown(module: Module, collection: str, name: str, calls: Any = tuple) -> LinenSownValue:
    return LinenSownValue(collection, name, len(module.path), calls)


def sow(adapter: Any, original: Function) -> Any:
    """Wrap `Module.sow`, to mark the value."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def sow(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # `capture_intermediates` sows the results of methods, which are sites already.
        itself = sys._getframe(1).f_globals is vars(_module)
        if active_policy() is None or itself or self.scope is None:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        collection, name, value = (given[key] for key in ("col", "name", "value"))
        reduce, init = given["reduce_fn"], given["init_fn"]
        calls = find_container(reduce, init)
        fields = {"reduce": reduce, "init": init} if calls is None else {}
        what = _recorded(self)
        if what is None:
            fields["collection"] = collection
        elif not what.is_mutable(collection):
            return False
        elif calls is None and self.scope.has_variable(collection, name):
            # The fold continues from the state that the user passed to `apply`.
            return original(self, *args, **kwargs)
        else:
            fields["collection"] = _sown(self, collection, name, calls)
        with within(adapter, self, adapter.scope_of(self)):
            mark(value, segment(name), "sow", **fields)
        return original(self, *args, **kwargs) if what is None else True

    return sow


def perturb(adapter: Any, original: Function) -> Any:
    """Wrap `Module.perturb`, to mark the value."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def perturb(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if active_policy() is None or self.scope is None:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        collection, name, value = (given[key] for key in ("collection", "name", "value"))
        what = _recorded(self)
        if what is None:
            value = original(self, *args, **kwargs)
        elif not (what.is_mutable(collection) or collection in what.perturbed):
            return value
        kind = collection if what is None else _sown(self, collection, name)
        with within(adapter, self, adapter.scope_of(self)):
            return mark(value, segment(name), "perturb", collection=kind)

    return perturb
