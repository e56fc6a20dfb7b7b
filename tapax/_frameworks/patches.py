"""Patches: attributes of classes, replaced while captures run and restored afterwards.

Captures may nest and run on several threads: the first to enter installs a patch, and the last to
leave removes it, whatever happened in between. The replacement must check whether a capture is
tracing on its thread.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tapax._frameworks.interface import Adapter, Module
from tapax._frameworks.module_calls import MethodCall, called
from tapax._frameworks.users_code import is_users_code
from tapax._jax import Function, PyTree
from tapax._marks.context import active_policy
from tapax._sites import segment

_lock = threading.RLock()

Replacements = Iterable[tuple[Any, str, Callable[[Any], Any]]]


class Patch:
    """A patch of attributes of classes or Python modules.

    `find` returns for each the class, the name of the attribute, and a function that wraps it. The
    patch calls `find` whenever a capture begins, as there may be new classes; and when the first
    instance of a subclass of `base` is made, as the captured function may define classes.
    """

    def __init__(self, find: Callable[[], Replacements], base: type | None = None):
        self._find = find
        self._base = base
        self._classes: set[type] = set()
        self._users = 0
        self._originals: dict[tuple[Any, str], Any] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with _lock:
            self._users += 1
        try:
            self._put()
            yield
        finally:
            with _lock:
                self._users -= 1
                if not self._users:
                    while self._originals:
                        (cls, name), original = self._originals.popitem()
                        _set(cls, name, original)
                    self._classes.clear()

    def _put(self) -> None:
        with _lock:
            for cls, name, wrap in (*self._find(), *self._makers()):
                if (cls, name) not in self._originals:
                    original = cls.__dict__[name]
                    self._originals[cls, name] = original
                    _set(cls, name, wrap(original))

    def _makers(self) -> Replacements:
        """Yield the replacement of the metaclass's `__call__`, which makes the instances."""
        if self._base is not None:
            self._classes.update(subclasses(self._base))
            maker = next(
                meta for meta in inspect.getmro(type(self._base)) if "__call__" in meta.__dict__
            )
            yield maker, "__call__", self._maker

    def _maker(self, original: Function) -> Any:
        @functools.wraps(original)
        def make(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            if self._users and cls not in self._classes and issubclass(cls, self._base or ()):
                self._put()
            return original(cls, *args, **kwargs)

        return make


class PatchedAdapter(Adapter):
    """An adapter that observes calls by replacing the methods of the subclasses of `base`."""

    base: type

    def __init__(self) -> None:
        self._patch = Patch(self._replacements, self.base)

    def is_module(self, value: PyTree) -> bool:
        return isinstance(value, self.base)

    def children(self, module: Module) -> Iterator[tuple[str, Any]]:
        return ((segment(key), value) for key, value in vars(module).items())

    def observe_calls(self) -> contextlib.AbstractContextManager[Any]:
        return self._patch()

    def _replacements(self) -> Replacements:
        raise NotImplementedError


def _set(owner: Any, name: str, value: PyTree) -> None:
    # A metaclass may forbid assignments to attributes.
    (type.__setattr__ if isinstance(owner, type) else setattr)(owner, name, value)


def subclasses(base: type) -> Iterator[type]:
    """Yield a class and all its subclasses."""
    seen = {base}
    waiting = [base]
    while waiting:
        cls = waiting.pop()
        yield cls
        new = [sub for sub in type.__subclasses__(cls) if sub not in seen]
        seen.update(new)
        waiting += new


def methods(
    adapter: Adapter, base: type, skip: Iterable[type], call: Callable[..., Any] = called
) -> Replacements:
    """Yield replacements for the methods of all subclasses of `base`, which `call` then runs.

    A subclass may inherit methods from a mixin, a class that is not a subclass of `base`.
    """
    skipped = frozenset(skip)
    found = [cls for cls in subclasses(base) if cls not in skipped]
    for cls, name in _method_names((*found, *_mixins(found, base))):
        yield cls, name, functools.partial(_method, adapter, base, cls, name, call)


def mixin_methods(base: type, wrap: Callable[[type, str, Any], Any]) -> Replacements:
    """Yield replacements for the methods that subclasses of `base` inherit from mixins."""
    for cls, name in _method_names(_mixins(subclasses(base), base)):
        yield cls, name, functools.partial(wrap, cls, name)


def _method_names(classes: Iterable[type]) -> Iterator[tuple[type, str]]:
    for cls in classes:
        for name, value in list(cls.__dict__.items()):
            if is_method(name, value):
                yield cls, name


def _mixins(classes: Iterable[type], base: type) -> Iterator[type]:
    """Yield the classes of users, not derived from `base`, from which `classes` inherit."""
    seen = set[type]()
    for cls in classes:
        for mixin in cls.__mro__:
            if mixin in seen or base in mixin.__mro__:
                continue
            seen.add(mixin)
            package = mixin.__module__.partition(".")[0]
            is_users = is_users_code(package) and package not in sys.stdlib_module_names
            if is_users and not mixin.__flags__ & _IMMUTABLE:
                yield mixin


_IMMUTABLE = 1 << 8
"""The flag of a class that is written in C and refuses other attributes."""


def is_method(name: str, value: PyTree) -> bool:
    """Return whether an attribute of a class is a method that may return the result of a module."""
    if name.startswith("__") and name != "__call__":
        return False
    if isinstance(value, functools.partialmethod):  # which cannot be called without an instance
        return True
    if isinstance(value, (type, staticmethod, classmethod, property)) or not callable(value):
        return False
    return hasattr(type(value), "__get__")


def _method(
    adapter: Adapter,
    base: type,
    owner: type,
    name: str,
    call: Callable[..., Any],
    original: Function,
) -> Any:
    # A framework's wrapper of a function takes the module as its first argument, too.
    plain = inspect.isfunction(original) or adapter.wraps(original)
    is_mixin = base not in owner.__mro__

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(original, self) if plain else original.__get__(self, type(self))
        # A method that a subclass calls by `super()` is part of the method of the subclass.
        if active_policy() is None or not is_first(owner, name, type(self)):
            return bound(*args, **kwargs)
        if is_mixin and not adapter.is_module(self):
            return bound(*args, **kwargs)
        return call(MethodCall(adapter, self, name, bound, args, kwargs))

    setattr(method, _ORIGINAL, original)
    return functools.update_wrapper(method, original)


_ORIGINAL = "_tapax_original"
"""The attribute of a patched method with the method before the patch."""


def current(fn: Function) -> Any:
    """Return a bound method as it would be bound now, since its class may have been patched."""
    if isinstance(fn, functools.partial):
        func = current(fn.func)
        if fn.args and func is fn.func:  # `nnx.jit` binds a method by a partial
            func = _find_attribute(type(fn.args[0]), func) or func
        return fn if func is fn.func else functools.partial(func, *fn.args, **fn.keywords)
    if not inspect.ismethod(fn):
        return fn
    now = _find_attribute(type(fn.__self__), fn.__func__)
    return fn if now is None else now.__get__(fn.__self__)


def _find_attribute(cls: type, method: Any) -> Any:
    """Find the attribute of a class that is a method, perhaps patched; None if there is none.

    The attribute may have another name than the function, by a decorator or an assignment.
    """
    wanted, first = _unpatched(method), getattr(method, "__name__", "")
    found = {
        name: value
        for c in reversed(cls.__mro__)
        for name, value in vars(c).items()
        if callable(value)
        and _unpatched(value) is wanted
        and inspect.getattr_static(cls, name) is value
    }
    return found.get(first, next(iter(found.values()), None))


def _unpatched(method: Any) -> Any:
    return getattr(method, _ORIGINAL, method)


def is_first(owner: type, name: str, cls: type) -> bool:
    """Return whether `cls` has its method `name` from `owner`, and no subclass overrides it."""
    return next(c for c in cls.__mro__ if name in c.__dict__) is owner
