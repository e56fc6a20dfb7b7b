"""The calls that the methods make: arguments, metrics, compilation."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tapax import _jax
from tapax._api.edit import edited
from tapax._frameworks import registry
from tapax._jax import Function, PyTree


def arguments(given: Any) -> tuple[Any, ...]:
    """Return the arguments of a call, given as a tuple or as a single argument."""
    alone = not isinstance(given, tuple) or hasattr(given, "_fields")
    return (given,) if alone else given


def check_alike(clean: PyTree, corrupt: PyTree) -> None:
    """Raise unless one program can run both calls."""
    leaves, trees = zip(*map(jax.tree.flatten_with_path, (clean, corrupt)), strict=True)
    if trees[0] != trees[1]:
        raise ValueError(
            "`clean` and `corrupt` must have the same structure, but have the structures "
            f"{trees[0]} and {trees[1]}."
        )
    for (path, a), (_, b) in zip(*leaves, strict=True):
        shapes = [list(np.shape(x)) if hasattr(x, "shape") else None for x in (a, b)]
        if shapes[0] != shapes[1]:
            place = f"argument {path[0].idx}" + jax.tree_util.keystr(path[1:])
            raise ValueError(
                f"`clean` and `corrupt` must have the same shapes, but {place} has the shape "
                f"{shapes[0]} in one and {shapes[1]} in the other. Pad the shorter one."
            )


def check_array(out: PyTree) -> None:
    """Raise if a metric is not an array."""
    if not isinstance(out, (jax.Array, np.ndarray, np.generic, int, float)):
        raise TypeError(
            "The function must return a metric, a number or one array, but returns "
            f"{type(out).__name__}. Return the quantity to compare, such as a difference of "
            "logits."
        )


def is_broadcastable(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Return whether an array of one shape can be broadcast to another shape."""
    try:
        return np.broadcast_shapes(shape, into) == tuple(into)
    except ValueError:
        return False


def compile_method(body: Callable[..., Any], fn: Function, *options: Any) -> Callable[..., Any]:
    """Compile `body(fn, *options, ...)`, once for all calls if `fn` itself is compiled.

    A plain function is compiled in every call, because it may close over values that change.
    """
    if _jax.jit_options(fn) is not None or registry.has_repeatable_calls(fn):
        with contextlib.suppress(TypeError):  # a predicate that cannot be hashed
            return _compile_once(body, fn, options)
    return _compile(body, fn, options)


def _compile(
    body: Callable[..., Any], fn: Function, options: tuple[Any, ...]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return body(fn, *options, *args, **kwargs)

    run.__name__ = run.__qualname__ = body.__name__.lstrip("_")
    return edited(run)


_compile_once = functools.lru_cache(maxsize=32)(_compile)
