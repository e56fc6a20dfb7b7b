"""The command line: `python -m tapax nonfinite script.py` finds the first bad step of a script.

The script runs as it is, with its own arguments. While it does, the results of the jitted functions
that it calls are checked, and the objects that these update; jitted means `jax.jit`, and the `jit`s
of Flax NNX, Equinox and brainstate. At the first result with a NaN or an infinity the search of
`tapax.find_nonfinite` runs on the inputs of that very call, its report is printed, and the inputs
are saved: `inputs.safetensors` has the arrays, `inputs.json` says what they are.

    python -m tapax nonfinite --save bad train.py --lr 0.1
    python -m tapax nonfinite --replay bad train.py --lr 0.1

The second command runs the script up to the first call of that function, and searches on the saved
inputs instead of those of the call.

The exit code is 1 if something was found, 0 if the script ended and nothing was, 2 if there is no
script; otherwise that of the script. Infinities that were meant, constants and arguments, are no
reason to stop.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.abc
import importlib.util
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax import _jax
from tapax._frameworks.registry import loaded_adapters
from tapax._sites.errors import name_of
from tapax.nonfinite._finding import Finding
from tapax.nonfinite._search import NonfiniteSearch

_JITS = {"flax.nnx": "jit", "equinox": "filter_jit", "brainstate": "transform.jit"}
"""What frameworks call their `jit`, by the module whose import brings it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tapax")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "nonfinite", help="run a script, and stop where the first NaN or infinity is made"
    )
    command.add_argument(
        "--save", metavar="DIR", default="nonfinite", help="where the inputs of the bad call go"
    )
    command.add_argument(
        "--every", metavar="N", type=int, default=1, help="check every N-th call of a function"
    )
    command.add_argument("--replay", metavar="DIR", help="search on inputs that were saved")
    command.add_argument("script")
    command.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    if given.every < 1:
        parser.error(f"--every must be at least 1, but is {given.every}.")
    if not os.path.isfile(given.script):
        parser.error(f"There is no script {given.script!r}.")
    saved = None
    if given.replay is not None:
        try:
            saved = load_inputs(given.replay)
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"{given.replay!r} has no saved inputs that can be read: {error}")
    return _run(given.script, given.arguments, _Watch(given.every, given.save, saved))


def _run(script: str, arguments: Sequence[str], watch: _Watch) -> int:
    """Runs a script under a watch; returns the exit code."""
    script = os.path.abspath(script)
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
    code: Any = 0
    try:
        with _watched(watch):
            runpy.run_path(script, run_name="__main__")
    except _Found as found:
        _say(str(found.finding))
        for line in found.notes:
            _say(line)
        return 1
    except SystemExit as exit:
        code = exit.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        code = 0 if code is None else code if isinstance(code, int) else 1
    except BaseException as error:
        _print_own(error)
        _say(f"The script failed. {watch.clean()}")
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.argv, sys.path[0] = before
    _say(watch.clean())
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_own(error: BaseException) -> None:
    """The traceback as it would be without us: from the script on."""
    frames = error.__traceback__
    while frames is not None and not _is_scripts(frames.tb_frame):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames or error.__traceback__)


def _is_scripts(frame: Any) -> bool:
    return frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename == sys.argv[0]


class _Found(BaseException):
    """Ends the script. It is no `Exception`, so that the script does not take it for its own."""

    def __init__(self, finding: Finding, notes: Sequence[str]):
        super().__init__(str(finding))
        self.finding, self.notes = finding, notes


class _Watch:
    """Checks what jitted functions return."""

    def __init__(self, every: int, save: str, saved: Saved | None):
        self.every, self.save, self.saved = every, save, saved
        self.checked = 0
        self.busy = False
        self._searches: dict[int, tuple[Any, NonfiniteSearch]] = {}
        self._calls: dict[int, int] = {}

    def clean(self) -> str:
        """What there is to say if nothing was found."""
        if self.saved is not None:
            return f"No call of {self.saved.function} like the saved one was seen."
        if not self.checked:
            return (
                "No call of a jitted function was seen, so nothing was checked. What is not jitted "
                "is not looked at: put the train step under jax.jit."
            )
        return f"No non-finite value was seen in {self.checked} checked calls of jitted functions."

    def call(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Calls a jitted function, and checks what it does."""
        if self.busy or not _jax.trace_state_clean():
            return fn(*args, **kwargs)
        count = self._calls[id(fn)] = self._calls.get(id(fn), 0) + 1
        if (count - 1) % self.every and self.saved is None:
            return self._alone(fn, args, kwargs)
        search = self._search(fn)
        before = self._alone(search.arrays, args, kwargs, whole=True)
        if self.saved is not None:
            if self.saved.fits(fn, before):
                self._stop(search, args, kwargs, self.saved.arrays)
            return self._alone(fn, args, kwargs)
        if _donates(fn):
            before = [_copy(x) for x in before]
        out = self._alone(fn, args, kwargs)
        self.checked += 1
        after = self._alone(search.arrays, args, kwargs, whole=True)
        changed = [x for x, y in zip(after, before, strict=False) if x is not y]
        if _any_bad([*jax.tree.leaves(out), *changed]):
            self._stop(search, args, kwargs, before)
        return out

    def _alone(self, fn: Any, args: Any, kwargs: Any, whole: bool = False) -> Any:
        """Calls a function in which jitted ones are not checked on their own."""
        self.busy = True
        try:
            return fn(args, kwargs) if whole else fn(*args, **kwargs)
        finally:
            self.busy = False

    def _search(self, fn: Any) -> NonfiniteSearch:
        # The function is kept so that its id stays its own.
        return self._searches.setdefault(id(fn), (fn, NonfiniteSearch(fn)))[1]

    def _stop(self, search: NonfiniteSearch, args: Any, kwargs: Any, arrays: list[Any]) -> None:
        """Searches on the inputs of a call; ends the script if there is something to report."""
        search.inputs = arrays
        try:
            finding = self._alone(search.find, args, kwargs, whole=True)
        finally:
            search.inputs = None
        name = name_of(search.fn)
        if finding is None:
            if self.saved is not None:
                _say(f"The results of {name} on the saved inputs are finite.")
                raise SystemExit(0)
            return
        if finding.kind == "inf" and finding.operation in ("argument", "constant"):
            return
        number = self._calls[id(search.fn)]
        notes = [f"It was call {number} of {name}."]
        if self.saved is None:
            notes += _saved_notes(self.save, name, number, arrays)
        raise _Found(finding, notes)


def _any_bad(leaves: Sequence[Any]) -> bool:
    arrays = [
        x
        for x in leaves
        if isinstance(x, (jax.Array, np.ndarray))
        and jnp.issubdtype(x.dtype, jnp.inexact)
        and not (isinstance(x, jax.Array) and x.is_deleted())
    ]
    return bool(_bad(arrays)) if arrays else False


@jax.jit
def _bad(arrays: Sequence[Any]) -> Any:
    return ~functools.reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in arrays])


def _donates(fn: Any) -> bool:
    """Whether a function may be given its arguments for good; only `jax.jit`'s tell."""
    options = _jax.jit_options(fn)
    return options is None or bool(options["donate_argnums"] or options["donate_argnames"])


def _copy(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else x


# --- saved inputs -----------------------------------------------------------------------------


class Saved:
    """The inputs of a call: the name of the function, and its arrays in order."""

    def __init__(self, function: str, arrays: list[Any]):
        self.function, self.arrays = function, arrays

    def fits(self, fn: Any, arrays: Sequence[Any]) -> bool:
        """Whether they are inputs for a call of a function on such arrays."""
        types = [(jnp.shape(x), jax.typeof(x).dtype) for x in self.arrays]
        return name_of(fn) == self.function and types == [
            (jnp.shape(x), jax.typeof(x).dtype) for x in arrays
        ]


def save_inputs(directory: str, function: str, arrays: Sequence[Any]) -> None:
    """Saves the arrays of a call; as bytes, so that every type of JAX's can be saved."""
    from safetensors.numpy import save_file

    os.makedirs(directory, exist_ok=True)
    stored, entries = {}, []
    for i, x in enumerate(arrays):
        entry: dict[str, Any] = {}
        if jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key):
            entry["key"] = str(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        whole = np.ascontiguousarray(np.asarray(x))
        entry |= {"shape": list(np.shape(x)), "dtype": whole.dtype.name}
        stored[str(i)] = np.frombuffer(whole.tobytes(), np.uint8)
        entries.append(entry)
    save_file(stored, os.path.join(directory, "inputs.safetensors"))
    with open(os.path.join(directory, "inputs.json"), "w") as file:
        json.dump({"version": 1, "function": function, "arrays": entries}, file, indent=1)


def load_inputs(directory: str) -> Saved:
    """The inputs that were saved in a directory."""
    from safetensors.numpy import load_file

    with open(os.path.join(directory, "inputs.json")) as file:
        about = json.load(file)
    if about["version"] != 1:
        raise ValueError(f"they are of the version {about['version']}, this is 1.")
    stored = load_file(os.path.join(directory, "inputs.safetensors"))
    arrays = []
    for i, entry in enumerate(about["arrays"]):
        flat = np.frombuffer(stored[str(i)].tobytes(), jnp.dtype(entry["dtype"]))
        x: Any = jnp.asarray(flat.reshape(entry["shape"]))
        arrays.append(jax.random.wrap_key_data(x, impl=entry["key"]) if "key" in entry else x)
    return Saved(about["function"], arrays)


def _saved_notes(directory: str, name: str, number: int, arrays: Sequence[Any]) -> list[str]:
    try:
        save_inputs(directory, name, arrays)
    except (OSError, ValueError) as error:
        return [f"Its inputs could not be saved in {directory!r}: {error}"]
    script = " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return [
        f"Its inputs are in {directory!r}. To search on them again:",
        f"  python -m tapax nonfinite --replay {directory} {script}",
    ]


# --- jitted functions -------------------------------------------------------------------------


class _Jitted:
    """A jitted function whose calls are seen. In all else it is the function."""

    def __init__(self, fn: Any, watch: _Watch):
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


def _seen(jit: Callable[..., Any], watch: _Watch) -> Callable[..., Any]:
    """A `jit` whose functions are seen."""

    @functools.wraps(jit)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = jit(*args, **kwargs)
        if args and callable(args[0]):
            return _Jitted(made, watch)
        return lambda fn: _Jitted(made(fn), watch)  # it was given options alone

    return wrapped


@contextlib.contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    """Within, jitted functions that are made are seen; those of frameworks as they are imported."""
    replaced: list[tuple[Any, str, Any]] = []

    def replace(module: Any, name: str) -> None:
        loaded_adapters()  # they look at what a `jit` makes, and must see the framework's own
        *around, name = name.split(".")
        module = functools.reduce(getattr, around, module)
        jit = getattr(module, name)
        replaced.append((module, name, jit))
        setattr(module, name, _seen(jit, watch))

    finder = _AfterImport(
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


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function on a module once it was imported."""

    def __init__(self, then: dict[str, Callable[[Any], None]]):
        self._then = dict(then)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        then = self._then.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if then else None
        if then is None or spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            then(module)

        loader.exec_module = exec_module
        return spec
