"""Derivatives of functions by some of their operands, as rules of JAX are given them.

A rule that asks for symbolic zeros is told which operands move. Those that do not stay as they are,
so that a function inside with such a rule of its own is told the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0

from tapax import _jax
from tapax._jax import Value, typed


def fix(fn: Callable[..., Any], flat: Sequence[Value], moved: Sequence[int]) -> Callable[..., Any]:
    """A function of those of its operands that move; the others are fixed."""

    def call(*values: Value) -> Any:
        given = dict(zip(moved, values, strict=True))
        return fn(*(given.get(i, x) for i, x in enumerate(flat)))

    return call


def jvp(
    fn: Callable[..., Any], flat: Sequence[Value], moved: Sequence[int], tangents: Sequence[Value]
) -> Any:
    """The results of a function, and their tangents for those of the operands that move."""
    return typed.jvp(fix(fn, flat, moved), [flat[i] for i in moved], list(tangents))


def vjp(fn: Callable[..., Any], flat: Sequence[Value], moved: Sequence[int], **options: Any) -> Any:
    """The results of a function, and the function that gives the gradients by what moves."""
    return typed.vjp(fix(fn, flat, moved), *(flat[i] for i in moved), **options)


def instantiate(t: Value) -> Any:
    """A tangent or cotangent as an array, also where JAX knows that it is zero."""
    if not isinstance(t, SymbolicZero):
        return t
    aval: Any = t.aval
    return np.zeros(aval.shape, aval.dtype) if aval.dtype == float0 else _jax.zeros(aval)
