"""The marks of NNX, `self.sow` and `self.perturb`, as tapax sees them.

They are sites; a site with a reducer is a fold, unless the reducer keeps every call. They also have
their effect without a capture: if NNX stores attributes on the module (its older form), the program
may read the attributes later, so the marks store them. When the captured function returns, tapax
removes them, so that the model does not grow. If stored attributes change the structure of a
loop's carry, JAX cannot trace the program; then tapax traces it a second time without them.

`tapax.compat.nnx` captures within `recording`: then a mark records the `NNXSownValue` of its site,
and `perturb` adds the perturbation that the module carries.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import config, errors, nnx

from tapax._frameworks.flax_reducers import find_container
from tapax._frameworks.interface import Adapter, Module
from tapax._frameworks.module_calls import within
from tapax._frameworks.nnx.holders import is_object
from tapax._frameworks.patches import is_first
from tapax._jax import Function, PyTree, Value
from tapax._marks.context import ContextVariable, active_policy
from tapax._marks.sow import SownValue, mark
from tapax._sites import SiteError, segment

# Both are part of the key of every `jit` cache, because the trace depends on them.
_storing = ContextVariable(True)
_recording = ContextVariable[Any](None)
_thread = threading.local()
# All attributes that marks have stored, ever: the structure from the trace of an `nnx.jit` contains
# the stored attributes, and stores them in later calls without running a mark.
_stored: set[tuple[type, str]] = set()
_PREFIX = "_perturbation_"
_NAME = "_tapax_name"


@dataclasses.dataclass(frozen=True)
class NNXSownValue(SownValue):
    """The sown or perturbed value of which a site is a leaf.

    `calls` is the container that keeps every call; None if the mark folds the calls into one value.
    `index` numbers the calls of a `perturb` that adds a perturbation; None for other marks.
    """

    kind: Any
    name: str
    calls: type | None = tuple
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class NNXRecordOptions:
    """Options of a recording: variable types, the type for method results, whether to perturb."""

    kinds: frozenset[Any] = frozenset()
    outputs: Any = None
    perturbed: bool = False


@contextlib.contextmanager
def recording(what: NNXRecordOptions) -> Iterator[None]:
    """Record `NNXSownValue`s for marks within the context."""
    before = getattr(_thread, "calls", None)
    _thread.calls = {}
    try:
        with _recording(what):
            yield
    finally:
        _thread.calls = before


def carry(module: Module, name: str, perturbation: PyTree) -> None:
    """Make a module carry a perturbation, through any transformation."""
    setattr(module, _PREFIX + name, perturbation)


def rename(module: Module, name: str) -> None:
    """Give a model another name than that of its class, through any transformation."""
    setattr(module, _NAME, name)


def name_of(module: Module) -> str:
    """Return the name of a model."""
    return getattr(module, _NAME, type(module).__name__)


def is_own(path: tuple[Any, ...], _: Any) -> bool:
    """Return whether a variable belongs to its module, and is not a carried perturbation."""
    return not str(path[-1]).startswith(_PREFIX)


def drop(module: Module) -> None:
    """Remove the carried perturbations and the name from a module."""
    for name in [name for name in vars(module) if name.startswith((_PREFIX, _NAME))]:
        delattr(module, name)


def _arguments(original: Function) -> Callable[..., dict[str, Any]]:
    signature = inspect.signature(original)

    def bind(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        kind = bound.arguments["variable_type"]
        if isinstance(kind, str):
            kind = nnx.variable_type_from_name(kind, allow_register=True)
        return {**bound.arguments, "variable_type": kind}

    return bind


def sow(adapter: Adapter, original: Function) -> Any:
    """Wrap `Module.sow`, to add marks."""
    bind = _arguments(original)

    @functools.wraps(original)
    def sow(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if active_policy() is None:
            return original(self, *args, **kwargs)
        given = bind(self, *args, **kwargs)
        what = _recording.value
        if what is not None and given["variable_type"] not in what.kinds:
            return False
        reduce, init = given["reduce_fn"], given["init_fn"]
        calls = find_container(reduce, init)
        fields = {} if calls is not None else {"reduce": reduce, "init": init}
        with within(adapter, self):
            if calls is None and what is not None:
                _go_on(self, given)
            mark(given["value"], segment(given["name"]), "sow", **_said(given, calls), **fields)
        if hasattr(self, "__captures__"):
            return original(self, *args, **kwargs)
        if _stores(given):
            _store(self, given, original)
        return what is not None or _stores(given)

    return sow


def _said(given: dict[str, Any], calls: Any = tuple, index: int | None = None) -> dict[str, Any]:
    """Return the arguments of `mark` that describe a mark of NNX."""
    kind, name = given["variable_type"], given["name"]
    recorded = _recording.value is not None
    return {"collection": NNXSownValue(kind, name, calls, index) if recorded else kind}


_NOTHING = object()


def _go_on(module: Module, given: dict[str, Any]) -> None:
    """Start an empty fold from the value that its module carries, if there is one."""
    held: Any = getattr(module, _PREFIX + given["name"], None)
    if type(held) is given["variable_type"]:
        begin = {"reduce": lambda a, v: v if a is _NOTHING else a, "init": lambda: _NOTHING}
        mark(held.get_value(), segment(given["name"]), "sow", **_said(given, None), **begin)


def perturb(adapter: Adapter, original: Function) -> Any:
    """Wrap `Module.perturb`, to add marks."""
    bind = _arguments(original)

    @functools.wraps(original)
    def perturb(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if active_policy() is None:
            return original(self, *args, **kwargs)
        given = bind(self, *args, **kwargs)
        index = None
        if _recording.value is not None and _recording.value.perturbed:
            given["value"], index = _perturbed(self, given["name"], given["value"])
        elif hasattr(self, "__captures__"):
            given["value"] = original(self, *args, **kwargs)
        elif _stores(given):
            given["value"] = _add(self, given, original)
        said = _said(given, index=index)
        with within(adapter, self):
            return mark(given["value"], segment(given["name"]), "perturb", **said)

    return perturb


def _perturbed(module: Module, name: str, value: PyTree) -> tuple[Any, int]:
    """Add the perturbation that the module carries for this call; return the call's index too."""
    where = f"perturb({name!r}) of a {type(module).__name__}"
    held = getattr(module, _PREFIX + name, None)
    if held is None:
        raise SiteError(
            f"`init` has no perturbation for {where}. Make `init` by capturing the same function "
            "with nnx.Perturbation, or leave `init` out."
        )
    calls = _thread.calls.setdefault((id(module), name), [0, module])
    index, calls[0] = calls[0], calls[0] + 1
    given = held.get_value()
    if jax.tree.structure(given) != jax.tree.structure(value):
        if not isinstance(given, tuple) or index >= len(given):
            raise SiteError(
                f"`init` has perturbations for fewer calls of {where} than there are, or for a "
                "value of another structure. Make `init` by capturing the same function."
            )
        given = given[index]

    def add(x: Value, p: Any) -> Any:
        if np.shape(x) != np.shape(p):
            raise SiteError(
                f"`init` has a perturbation of shape {list(np.shape(p))} for {where}, whose value "
                f"has shape {list(np.shape(x))} here. Make `init` from inputs of the same shape. "
                "In a loop or a vmap that does not divide the module, take the gradients from "
                "tapax.capture instead, which returns one for every iteration and example."
            )
        return x + p.astype(jax.numpy.result_type(x))

    return jax.tree.map(add, value, given), index


def outputs(adapter: Adapter, owner: type, name: str, wrap: Function, original: Function) -> Any:
    """Wrap a method by `wrap`, and sow its results under its name if a recording asks for them."""
    method = wrap(original)
    public = name == "__call__" or not name.startswith("_")

    @functools.wraps(method)
    def wrapped(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        out = method(self, *args, **kwargs)
        what = _recording.value
        if public and what is not None and what.outputs is not None and active_policy() is not None:
            first = adapter.is_module(self) and is_first(owner, name, type(self))
            if first and not any(map(is_object, jax.tree.leaves(out, is_leaf=is_object))):
                given = {"variable_type": what.outputs, "name": name}
                with within(adapter, self):
                    mark(out, name, "sow", **_said(given))
        return out

    return wrapped


def _stores(given: dict[str, Any]) -> bool:
    """Return whether a mark stores an attribute: NNX's older form does, outside `nnx.capture`."""
    without = given.get("capture_noop")
    if without is None:
        without = getattr(config, "nnx_sow_capture_noop", False)
    return not without and _recording.value is None


def _store(module: Module, given: dict[str, Any], original: Function) -> None:
    name, kind, value = given["name"], given["variable_type"], given["value"]
    held = getattr(module, name, None)
    if hasattr(module, name) and type(held) is not kind:
        original(**given)  # raises
    if not _storing.value:
        return
    try:
        if held is None:
            setattr(module, name, kind(given["reduce_fn"](given["init_fn"](), value)))
        else:
            held.set_value(given["reduce_fn"](held.get_value(), value))
        _stored.add((type(module), name))
    except errors.TraceContextError:
        pass  # the module belongs to an outer trace, so nothing can be stored on it


def _add(module: Module, given: dict[str, Any], original: Function) -> Any:
    name, kind, value = given["name"], given["variable_type"], given["value"]
    held = getattr(module, name, None)
    if held is not None:
        return held.get_value() + value if isinstance(held, kind) else original(**given)
    if not _storing.value:
        return value
    zeros = jax.tree.map(jax.numpy.zeros_like, value)
    try:
        setattr(module, name, kind(zeros))
        _stored.add((type(module), name))
    except errors.TraceContextError:
        return value
    return zeros + value


class Attributes:
    """The variables that modules have before a function runs, to restore them afterwards."""

    def __init__(self, nodes: Any):
        self._before = dict(self._all(nodes))

    @staticmethod
    def _all(nodes: Any) -> Iterator[tuple[tuple[int, str], Any]]:
        for _, module in nnx.iter_graph(nodes, graph=True):
            if isinstance(module, nnx.Module):
                for name, value in vars(module).items():
                    if isinstance(value, nnx.Variable) and not isinstance(value, nnx.Param):
                        yield (id(module), name), (module, value, value.get_value())

    def restore(self, nodes: Any) -> None:
        """Remove the attributes that marks have stored since."""
        if not _stored:
            return
        for key, (module, variable, _) in list(self._all(nodes)):
            if (type(module), key[1]) not in _stored:
                continue
            if key in self._before:
                variable.set_value(self._before[key][2])
            else:
                delattr(module, key[1])


def traced(trace: Callable[[], Any]) -> Any:
    """Trace a program; if that fails with stored attributes, trace it without storing any."""
    try:
        return trace()
    except Exception as error:
        if not _stored:
            raise
        with _storing(False):
            try:
                return trace()
            except Exception:
                raise error from None  # the stored attributes are not the cause
