"""`ScriptWatch`, which checks the results of the jitted functions that a script calls."""

import contextlib
import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax import _jax
from tapax._frameworks.interface import Module
from tapax._frameworks.registry import loaded_adapters
from tapax._jax import Args, Function, Kwargs, PyTree, Value
from tapax._sites import name_of
from tapax.nonfinite._finding import Finding
from tapax.nonfinite._saved_inputs import SavedInputs, save_inputs
from tapax.nonfinite._search import NonfiniteSearch

_JITS = {"flax.nnx": "jit", "equinox": "filter_jit", "brainstate": "transform.jit"}
"""The name of the `jit` of each framework, by the module whose import defines it."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ScriptStop(BaseException):
    """An exception that ends the script; not an `Exception`, which the script may catch."""

    def __init__(self, finding: Finding, notes: Sequence[str]):
        super().__init__(str(finding))
        self.finding, self.notes = finding, notes


class ScriptWatch:
    """A check of the results of all jitted functions that a script calls."""

    def __init__(self, every: int, save: str, saved: SavedInputs | None):
        self.every, self.save, self.saved = every, save, saved
        self.checked = 0
        self.busy = False
        self._searches: dict[int, tuple[Any, NonfiniteSearch]] = {}
        self._calls: dict[int, int] = {}

    def summary(self) -> str:
        """Return the sentence to print if the watch found nothing."""
        if self.saved is not None:
            return f"No call of {self.saved.function} like the saved one was seen."
        if not self.checked:
            return (
                "No call of a jitted function was seen, so nothing was checked. The command "
                "checks only jitted functions: put the train step under jax.jit."
            )
        return f"No non-finite value was seen in {self.checked} checked calls of jitted functions."

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watch all functions jitted in this context, also by frameworks that it imports."""
        replaced: list[tuple[Any, str, Any]] = []

        def replace(module: Module, name: str) -> None:
            loaded_adapters()  # adapters inspect results of `jit`: load them before replacing it
            *around, name = name.split(".")
            module = functools.reduce(getattr, around, module)
            jit = getattr(module, name)
            replaced.append((module, name, jit))
            setattr(module, name, _watch_jit(jit, self))

        finder = ImportHook(
            {module: functools.partial(replace, name=n) for module, n in _JITS.items()}
        )
        replace(jax, "jit")
        for module, name in _JITS.items():
            if module in sys.modules:
                replace(sys.modules[module], name)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for module, name, jit in replaced:
                setattr(module, name, jit)

    def call(self, fn: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call a jitted function, and check its results and updates."""
        if self.busy or not _jax.trace_state_clean():
            return fn(*args, **kwargs)
        # Do not check the jitted functions that this function calls.
        self.busy = True
        try:
            return self._call(fn, args, kwargs)
        finally:
            self.busy = False

    def _call(self, fn: Function, args: Args, kwargs: Kwargs) -> Any:
        count = self._calls[id(fn)] = self._calls.get(id(fn), 0) + 1
        if (count - 1) % self.every and self.saved is None:
            return fn(*args, **kwargs)
        # Keep the function, so that no other function gets its id.
        search = self._searches.setdefault(id(fn), (fn, NonfiniteSearch(fn)))[1]
        before = search.arrays(args, kwargs)
        if self.saved is not None:
            if self.saved.is_for(fn, before):
                self._stop(search, args, kwargs, self.saved.arrays)
            return fn(*args, **kwargs)
        if _may_donate(fn):
            before = [_copy(x) for x in before]
        try:
            out = fn(*args, **kwargs)
        except Exception:
            # The function may have raised because of a bad value.
            with contextlib.suppress(Exception):
                self._stop(search, args, kwargs, before)
            raise
        self.checked += 1
        after = search.arrays(args, kwargs)
        changed = [x for x, y in zip(after, before, strict=False) if x is not y]
        if _has_bad([*jax.tree.leaves(out), *changed]):
            self._stop(search, args, kwargs, before)
        return out

    def _stop(self, search: NonfiniteSearch, args: Args, kwargs: Kwargs, arrays: list[Any]) -> None:
        """Search on the inputs of a call; end the script if there is a bad value to report."""
        finding = search.find(args, kwargs, arrays)
        name = name_of(search.fn)
        if finding is None:
            if self.saved is not None:
                say(f"The results of {name} on the saved inputs are finite.")
                raise SystemExit(0)
            return
        if finding.kind == "inf" and finding.operation in ("argument", "constant"):
            return
        number = self._calls[id(search.fn)]
        notes = [f"It was call {number} of {name}."]
        if self.saved is None:
            notes += _save_and_note(self.save, name, number, arrays)
        raise ScriptStop(finding, notes)


def _has_bad(leaves: Sequence[Any]) -> bool:
    arrays = [
        x
        for x in leaves
        if isinstance(x, (jax.Array, np.ndarray))
        and jnp.issubdtype(x.dtype, jnp.inexact)
        and not (isinstance(x, jax.Array) and x.is_deleted())
    ]
    return bool(_is_any_bad(arrays)) if arrays else False


@jax.jit
def _is_any_bad(arrays: Sequence[Any]) -> Any:
    return ~functools.reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in arrays])


def _may_donate(fn: Function) -> bool:
    """Return whether a function may donate its arguments; only functions of `jax.jit` tell."""
    options = _jax.jit_options(fn)
    return options is None or bool(options["donate_argnums"] or options["donate_argnames"])


def _copy(x: Value) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def _save_and_note(directory: str, name: str, number: int, arrays: Sequence[Any]) -> list[str]:
    try:
        save_inputs(directory, name, arrays)
    except (OSError, ValueError) as error:
        return [f"Its inputs could not be saved in {directory!r}: {error}"]
    script = " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return [
        f"Its inputs are in {directory!r}. To search on them again:",
        f"  python -m tapax nonfinite --replay {directory} {script}",
    ]


class WatchedFunction:
    """A jitted function whose calls go through a watch; all else is as in the function."""

    def __init__(self, fn: Function, watch: ScriptWatch):
        self.__dict__.update(_fn=fn, _watch=watch, __wrapped__=getattr(fn, "__wrapped__", fn))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch.call(self._fn, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fn, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return repr(self._fn)

    def __hash__(self) -> int:
        return hash(self._fn)

    def __eq__(self, other: Any) -> bool:
        return self._fn == getattr(other, "_fn", other)

    @property
    def __class__(self) -> Any:  # pyright: ignore
        return type(self._fn)


def _watch_jit(jit: Callable[..., Any], watch: ScriptWatch) -> Callable[..., Any]:
    """Make a `jit` that returns watched functions."""

    @functools.wraps(jit)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = jit(*args, **kwargs)
        if args and callable(args[0]):
            return WatchedFunction(made, watch)
        return lambda fn: WatchedFunction(made(fn), watch)  # `jit` got only options

    return wrapped


class ImportHook(importlib.abc.MetaPathFinder):
    """An import hook that calls a function on each of some modules after its import."""

    def __init__(self, then: dict[str, Callable[[Any], None]]):
        self._then = dict(then)

    def find_spec(self, fullname: str, path: Any = None, target: PyTree = None) -> Any:
        then = self._then.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if then else None
        if then is None or spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Module) -> None:
            execute(module)
            then(module)

        loader.exec_module = exec_module
        return spec
