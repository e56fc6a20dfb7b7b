"""The user's code: which modules belong to the user, and the user's function inside a wrapper."""

from __future__ import annotations

import inspect
import types
from typing import Any

from tapax._jax import Function

NOT_USERS = frozenset(
    [
        "jax",
        "tapax",
        "flax",
        "equinox",
        "haiku",
        "brainstate",
        "keras",
        "contextlib",
        "functools",
        "threading",
    ]
)
"""The packages whose functions call the user's functions."""


def is_users_code(module: str | None) -> bool:
    """Return whether a Python module is the user's; code without a module is too."""
    return module is None or module.partition(".")[0] not in NOT_USERS


def closure_values(fn: types.FunctionType) -> list[Any]:
    """Return the values that a function closes over; None for a variable without a value yet."""
    cells = fn.__closure__ or ()
    # An empty cell equals other empty cells only.
    return [None if cell == types.CellType() else cell.cell_contents for cell in cells]


def find_signature(fn: Function) -> inspect.Signature:
    """Return the signature of a function, or of the user's function that a framework wrapped.

    Raises:
        TypeError, ValueError: if the function has no signature, as `inspect.signature` does.
    """
    signature = inspect.signature(fn)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if not kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return signature
    inner = _find_wrapped(fn)
    return signature if inner is None else inspect.signature(inner)


def _find_wrapped(fn: Any, around: frozenset[int] = frozenset()) -> Any:
    """Find the user's function inside the wrappers of frameworks; None if there is not just one.

    `nnx.grad` wraps a function without `functools.wraps`, so the function is found only among the
    values that the wrapper closes over. `around` has the ids of the wrappers around `fn`, one of
    which may close over itself.
    """
    inner = inspect.unwrap(fn)
    if id(inner) in around:
        return None
    code = getattr(inner, "__globals__", None)  # a method has that of its function
    if code is None:
        return None
    if is_users_code(code.get("__name__")):
        return inner
    if not inspect.isfunction(inner):
        return None
    around |= {id(inner)}
    closed = [_find_wrapped(value, around) for value in closure_values(inner) if callable(value)]
    found = {id(each): each for each in closed if each is not None}
    return next(iter(found.values())) if len(found) == 1 else None
