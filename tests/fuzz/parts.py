"""Parts of values, and functions of them, by their names in a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

INDICES: dict[str, Any] = {
    "first": 0,
    "last": -1,
    "middle": np.s_[..., 1],
    "tail": np.s_[1:],
    "back": np.s_[::-1],
    "odd": np.s_[::2],
    "some": [2, 0],
    "twice": np.array([1, 1, 0]),
    "mask": np.array([True, False, True]),
    "grid": np.array([[0], [2]]),
    "all": ...,
    "new": np.s_[None, ...],
}
"""Parts of a vector; `all` and `new` are parts of a number too."""


def has_part(index: str, shape: tuple[int, ...]) -> bool:
    """Return whether a value of some shape has a part."""
    return bool(shape) or index in ("all", "new")


def part(index: str | None, x: np.ndarray) -> np.ndarray:
    """Return a part of a value, or all of it."""
    return x if index is None else np.asarray(x[INDICES[index]])


def double(x: Any) -> Any:
    return x + x


def total(x: Any) -> Any:
    return x.sum(dtype=x.dtype)


def pair(x: Any) -> Any:
    return x[None].repeat(2, 0)


def by_call(x: Any, site: Any) -> Any:
    return x * (1 + site.call)


def square(x: Any) -> Any:
    return x * x


FUNCTIONS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn for fn in (double, total, pair, by_call, square)
}
"""Functions of a value; of a gradient too, except `square`: they must be linear, because gradients
add along the axes that a value does not have."""


def apply(by: str | None, x: np.ndarray, call: int) -> np.ndarray:
    """Apply a function to a value of a call; reducers apply later."""
    if by is None or by == "rms":
        return x
    if by == "by_call":
        return x * (1 + call)
    return np.asarray(FUNCTIONS[by](x))
