"""Flax Linen: modules are descriptions, bound to variables while `apply` or `init` runs them.

The adapter observes calls through `nn.intercept_methods`. A bound module knows its path, so its
name is that of its variables: `CNN/Conv_0`, `Net/layers_0/attn`. Its scope is relative to the
running module, so that a function that JAX traces once has the right names at every call.

A lifted transformation runs a method on a clone of the module inside. So in `nn.scan` the site is
the result of the method in every iteration, and not the result of the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from typing import Any

import flax
import jax
from flax import linen as nn
from flax.core import axes_scan
from flax.linen import attention
from flax.linen import module as _module
from flax.linen import transforms as _transforms

from tapax._frameworks.anchors import leaf_path
from tapax._frameworks.attention import marks_softmax
from tapax._frameworks.interface import Adapter, Module
from tapax._frameworks.linen.marks import perturb, record_result, sow
from tapax._frameworks.linen.methods import RunningFunction, contains
from tapax._frameworks.module_calls import MethodCall, mark_result, within
from tapax._frameworks.module_paths import anchored_root, locate, running_modules
from tapax._frameworks.patches import Patch, Replacements, is_first, mixin_methods
from tapax._frameworks.recurrent_cells import (
    HiddenError,
    RecurrentCell,
    check_inputs,
    find_input_shape,
    pair_paths,
    refuse_loop,
)
from tapax._jax import Args, Function, Kwargs, PyTree, Value
from tapax._marks.context import active_policy, without_marks
from tapax._marks.fingerprints import fingerprint
from tapax._marks.scopes import ModuleScope
from tapax._sites import join, segment


class _LinenCalls(threading.local):
    """The methods that are running on this thread, and whether the adapter observes its calls."""

    def __init__(self) -> None:
        self.stack: list[RunningFunction] = []
        self.seen = False


class Linen(Adapter):
    package = "flax"
    recurrent_type = nn.Module
    attention_types = (nn.MultiHeadDotProductAttention,)
    attention_function = "flax.linen.dot_product_attention"

    def __init__(self) -> None:
        self._calls = _LinenCalls()
        self._patch = Patch(self._replacements)
        self._models: MutableMapping[Any, str] = weakref.WeakKeyDictionary()

    def is_module(self, value: PyTree) -> bool:
        return isinstance(value, nn.Module)

    def children(self, module: Module) -> Iterator[tuple[str, Any]]:
        for name, value in vars(module).items():
            if name not in ("parent", "name") and not name.startswith("_"):
                yield segment(name), value

    def name(self, module: Module) -> str:
        return _users_class(module).__name__

    def maker(self, model: Module) -> Any:
        if not self.is_module(model):
            return None
        return lambda *args, **kwargs: model.init(jax.random.key(0), *args, **kwargs)

    def is_opaque(self, value: PyTree) -> bool:
        return isinstance(value, (nn.Module, nn.Variable))

    @contextlib.contextmanager
    def observe_calls(self) -> Iterator[None]:
        calls = self._calls
        with self._patch():
            if calls.seen:  # a capture around this one observes the calls
                yield
                return
            calls.seen = True
            try:
                with _intercept_first(self._intercept):
                    yield
            finally:
                calls.seen = False

    def context(self) -> Hashable:
        return (
            tuple(vars(flax.config)["_values"].items()),
            fingerprint([*_module._global_interceptor_stack], attributes),
        )

    def recurrent_cell(self, module: Module, inputs: Sequence[Any], state: PyTree) -> RecurrentCell:
        """Describe a bound module of Linen; a cell starts from its initial carry."""
        check_inputs(module, inputs)
        if isinstance(module, nn.RNN):
            refuse_loop(module, "model.cell, bound to its variables")
        if module.scope is None:
            raise HiddenError(
                f"`model` is a {type(module).__name__} without parameters, because it is not bound "
                "to variables. Give model.bind(variables)."
            )
        unbound, variables = module.unbind()

        def step(variables: Any, state: PyTree, *inputs: PyTree, **keywords: PyTree) -> Any:
            return unbound.apply(variables, state, *inputs, **keywords)

        if state is not None or not isinstance(module, nn.RNNCellBase):
            return RecurrentCell(step, variables, state)
        carry = unbound.initialize_carry(jax.random.key(0), find_input_shape(inputs))
        return RecurrentCell(step, variables, carry, pair_paths(carry, "c", "h"))

    def _replacements(self) -> Replacements:
        yield attention, "dot_product_attention_weights", marks_softmax
        yield nn.Module, "sow", functools.partial(sow, self)
        yield nn.Module, "perturb", functools.partial(perturb, self)
        yield _transforms._HashableProxy, "from_module", functools.partial(_from_module, self)
        yield axes_scan, "scan", _scan
        yield from mixin_methods(nn.Module, functools.partial(_of_mixin, self))

    def _intercept(self, run: Any, args: Args, kwargs: Kwargs, context: Any) -> Any:
        module, name = context.module, context.method_name
        if active_policy() is not None and name == "setup" and not module.path:
            self._models[module.scope.root] = self.name(module)
        if active_policy() is None or name == "setup":
            return run(*args, **kwargs)
        call = RunningFunction.of(module, context.orig_method.func, name)
        return self.observe(call, functools.partial(record_result, module, name), run, args, kwargs)

    def observe(
        self,
        call: RunningFunction,
        record: Callable[[PyTree], None],
        run: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Run a function of a module, record its result, and mark it if it is that of a method."""
        module, stack = call.module, self._calls.stack
        method = None if stack and call.is_part_of(stack[-1]) else call.method
        stack.append(call)
        try:
            with within(self, module, self.scope_of(module)):
                if method is None:
                    out = run(*args, **kwargs)
                else:
                    out = MethodCall(self, module, method, run, args, kwargs).run_marked()
                record(out)
                return out if method is None else mark_result(self, module, method, out)
        finally:
            stack.pop()

    def scope_of(self, module: Module) -> ModuleScope:
        """Return the scope of a module relative to the running module."""
        if module.scope is None:
            return locate(self, module)
        path, root = module.path, self._whole(module)
        for up, around in enumerate(reversed(running_modules())):
            if around.adapter is self and contains(around.module, module):
                return ModuleScope(_text(path[len(around.module.path) :]), root, up)
        if running_modules():
            return ModuleScope(root, root)
        params = module.scope.root.variables().get("params", {})
        leaves = jax.tree_util.tree_leaves_with_path(params)
        found = [(leaf_path(keys), x) for keys, x in leaves if isinstance(x, jax.Array)]
        return anchored_root(self, _applied(module), root, found, collection="params")

    def name_in_scope(self, module: Module) -> str:
        """Return the name of a module that has the path of the running one: by `nn.share_scope`."""
        around = running_modules()[-1] if running_modules() else None
        if around is None or around.adapter is not self or module is around.module:
            return ""
        bound = module.scope is not None and around.module.scope is not None
        # A clone of the running module has its name.
        if not bound or module.path != around.module.path or module.name == around.module.name:
            return ""
        parts = [x for x in self.children(around.module) if self.is_module(x[1])]
        attribute = next((key for key, part in parts if part.name == module.name), None)
        return attribute or segment(module.name or self.name(module))

    def _whole(self, module: Module) -> str:
        """Return the path of a module that starts with the class of the model."""
        model = module
        while isinstance(model.parent, nn.Module):
            model = model.parent
        # A module does not keep its parent alive: in `model.bind(variables).part` it is gone.
        name = self._models.get(module.scope.root) if model.path else None
        if name is not None:
            return join(name, _text(module.path))
        return join(self.name(model), _text(module.path[len(model.path) :]))


def _applied(module: Module) -> Any:
    """Return the module that the user applies; Linen runs a clone of it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _APPLYING:
            return frame.f_locals["self"]
        frame = frame.f_back
    return module


_APPLYING = frozenset(
    inspect.unwrap(getattr(nn.Module, name)).__code__ for name in ("apply", "init_with_output")
)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object; for a module, without those that `apply` binds."""
    found = vars(value)
    if not isinstance(value, nn.Module):
        return found
    return {k: v for k, v in found.items() if k not in ("parent", "scope") and k[0] != "_"}


@contextlib.contextmanager
def _intercept_first(interceptor: Any) -> Iterator[None]:
    """Install an interceptor outside of all others, where it sees the results that they return."""
    stack = _module._global_interceptor_stack

    def replace(change: Callable[[list[Any]], list[Any]]) -> None:
        before = [stack.pop() for _ in range(len(stack))]
        for each in change(before[::-1]):
            stack.push(each)

    replace(lambda others: [interceptor, *others])
    try:
        yield
    finally:
        replace(lambda both: both[1:])


def _users_class(module: Module) -> type:
    """Return the class of a module from before transformations derived another from it."""
    return next(c for c in type(module).__mro__ if c.__module__ != _transforms.__name__)


def _text(path: Sequence[str]) -> str:
    return "/".join(map(segment, path))


def _from_module(adapter: Linen, original: Function) -> Any:
    """Wrap the key by which `nn.jit` identifies modules, to add their paths.

    Otherwise `nn.jit` would trace once for modules that differ only in their paths, or in the
    modules that they take as attributes, and all of them would have the names of the first.
    """

    def from_module(cls: type, module: Module) -> Any:
        proxy = original.__get__(None, cls)(module)
        if active_policy() is None or module.scope is None:
            return proxy
        scope = adapter.scope_of(module)
        where = module.path, adapter.name_in_scope(module), str(scope), scope.up
        return dataclasses.replace(proxy, hash_key=hash((proxy.hash_key, where)))

    return classmethod(from_module)


def _of_mixin(adapter: Linen, owner: type, name: str, original: Function) -> Any:
    """Wrap a method of a mixin, which Linen neither intercepts nor records."""

    @functools.wraps(original)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, self)
        skipped = active_policy() is None or name == "setup" or not adapter.is_module(self)
        if skipped or not is_first(owner, name, type(self)):
            return run(*args, **kwargs)
        call = RunningFunction.of(self, original, name)
        return adapter.observe(call, lambda out: None, run, args, kwargs)

    return method


def _scan(original: Function) -> Any:
    """Wrap `nn.scan`, which first traces its body to find constants, to switch marks off there."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def scan(fn: Function, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(fn, *args, **kwargs)
        bound.apply_defaults()
        if active_policy() is None or not bound.arguments["check_constancy_invariants"]:
            return original(fn, *args, **kwargs)

        def scanned(*operands: Value) -> Any:
            trials = iter([True])

            def body(*state: Any) -> Any:
                with without_marks() if next(trials, False) else contextlib.nullcontext():
                    return fn(*state)

            return original(body, *args, **kwargs)(*operands)

        return scanned

    return scan


ADAPTER = Linen()
