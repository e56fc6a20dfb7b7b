"""Derivatives of functions with respect to some of their operands, for custom rules of JAX.

JAX tells a rule with symbolic zeros which operands are perturbed. The functions below differentiate
with respect to these `moved` operands alone, so that JAX also tells the custom rules of functions
inside which of their operands are perturbed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0

from tapax import _jax
from tapax._jax import Value, typed


def fix(fn: Callable[..., Any], flat: Sequence[Value], moved: Sequence[int]) -> Callable[..., Any]:
    """Make a function of the operands `moved` of `fn`; the others keep their values in `flat`."""

    def call(*values: Value) -> Any:
        given = dict(zip(moved, values, strict=True))
        return fn(*(given.get(i, x) for i, x in enumerate(flat)))

    return call


def jvp(
    fn: Callable[..., Any], flat: Sequence[Value], moved: Sequence[int], tangents: Sequence[Value]
) -> Any:
    """Return the results of `fn`, and their tangents for `tangents` of the operands `moved`."""
    return typed.jvp(fix(fn, flat, moved), [flat[i] for i in moved], list(tangents))


def vjp(fn: Callable[..., Any], flat: Sequence[Value], moved: Sequence[int], **options: Any) -> Any:
    """Return the results of `fn`, and its pullback to the operands `moved`."""
    return typed.vjp(fix(fn, flat, moved), *(flat[i] for i in moved), **options)


def instantiate(t: Value) -> Any:
    """Convert a symbolic zero to an array; return other tangents and cotangents unchanged."""
    if not isinstance(t, SymbolicZero):
        return t
    aval: Any = t.aval
    return np.zeros(aval.shape, aval.dtype) if aval.dtype == float0 else _jax.zeros(aval)
