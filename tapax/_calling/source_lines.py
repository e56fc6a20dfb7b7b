"""Equations and arrays in the user's words: the file and line, the name of the argument."""

import contextlib
import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any

import jax

from tapax import _jax
from tapax._frameworks.registry import loaded_adapters
from tapax._jax import Args, Equation, Function, Kwargs, pytrees
from tapax._marks.source_folders import JAX_FOLDER, TAPAX_FOLDER

_LIBRARIES = ("optax", "chex", "saiunit")


def line_of(equations: Sequence[Equation]) -> str:
    """Return the `file:line` of the user's code, else the line of a framework, else "".

    `equations` are the equation in question and, before it, the equations around it.
    """
    packages = {adapter.package for adapter in loaded_adapters()} | set(_LIBRARIES)
    theirs = [f"{os.sep}site-packages{os.sep}{p.split('.')[0]}{os.sep}" for p in packages]
    spare = ""
    # JAX's functions have no frame of the user, but the equations that call them have.
    for eqn in reversed(equations):
        for name, line in lines_outside_jax(eqn):
            spare = spare or f"{name}:{line}"
            if not any(part in name for part in theirs):
                return f"{name}:{line}"
    return spare


def lines_outside_jax(eqn: Equation) -> list[tuple[str, int]]:
    """Return the files and lines that traced an equation, innermost first, without JAX's."""
    return [
        (name, line)
        for name, line in _jax.lines_of(eqn)
        if not name.startswith((JAX_FOLDER, TAPAX_FOLDER))
    ]


class ArgumentNames:
    """Names for the arrays in the arguments of one call of `fn`."""

    def __init__(self, fn: Function, args: Args, kwargs: Kwargs):
        self._fn = fn
        self._arguments = args, kwargs

    @functools.cached_property
    def _places(self) -> dict[int, list[Any]]:
        """The paths under which the user passed each array, by the id of the array."""
        found: dict[int, list[Any]] = {}
        for path, x in pytrees.leaves_with_path(self._arguments):
            found.setdefault(id(x), []).append(path)
        return found

    def name(self, keys: Any, array: Any) -> str:
        """Return the parameter of `fn` that contains an array, and the path of the array within it.

        `keys` is the path of the array in the traced call, which splits objects into arrays.
        """
        # An array of a split object may be absent from the arguments, or have other keys there.
        places = self._places.get(id(array), [])
        known: Any = keys if keys in places else next(iter(places), None)
        rest: list[Any] = list(known or keys)
        which = rest.pop(0)
        if known and which.idx == 0:
            with contextlib.suppress(TypeError, ValueError, IndexError, AttributeError):
                rest[:1] = self._parameter(rest[0].idx)
        keystr: Function = getattr(jax.tree_util, "keystr")  # noqa: B009  (it has no full types)
        return keystr(tuple(rest), simple=True, separator="/")

    def _parameter(self, position: int) -> list[Any]:
        """Return the keys of a positional argument; `*args` has one for each of its arguments."""
        parameters = list(inspect.signature(self._fn).parameters.values())
        for number, parameter in enumerate(parameters[: position + 1]):
            if parameter.kind is parameter.VAR_POSITIONAL:
                key = jax.tree_util.SequenceKey(position - number)
                return [jax.tree_util.GetAttrKey(parameter.name), key]
        return [jax.tree_util.GetAttrKey(parameters[position].name)]
