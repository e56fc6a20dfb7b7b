"""Comparison of numbers from two different compilations.

Processors have different vector widths and fused operations, so each compiler sums terms in a
different order. The rounding error of a sum is proportional to its largest terms: it is
small relative to the largest entry of an array, but can be many times an entry whose large terms
cancel. An elementwise relative tolerance that holds on one machine therefore fails on another.
"""

from typing import Any

import jax
import numpy as np

TOLERANCES = {"float16": 5e-3, "bfloat16": 5e-2, "float32": 1e-5, "complex64": 1e-5}
SMALL, FLOOR = 1e-2, 1e-6
"""The largest error of arrays of small numbers, relative to their largest entry; and absolute."""


def assert_close(
    actual: Any,
    expected: Any,
    tol: float | None = None,
    *,
    scale: float | None = None,
    err_msg: str = "",
) -> None:
    """Assert that two pytrees of arrays are equal up to rounding.

    Args:
        actual: the arrays under test, as a single array or a pytree of arrays.
        expected: the correct arrays, in the same structure.
        tol: the largest allowed error, relative to `scale`. By default 1e-5 for float32 and numbers
            that are not arrays, 1e-10 for float64, and more for half precision; integers and
            booleans must be equal.
        scale: the size of the summed terms. By default the largest entry of each expected
            array, and at least one, since inputs and weights of the tests are of that order; but
            an error of more than 1% of the largest entry is never rounding. Pass it if every
            term is smaller, or if terms much larger than one cancel.
        err_msg: added to the message of the error.

    Raises:
        AssertionError: if structure, shapes or numbers differ.
    """
    if isinstance(actual, (jax.Array, np.ndarray, np.generic)):
        _assert_arrays_close(actual, expected, tol, scale, err_msg)
        return
    if isinstance(expected, dict):  # in any order
        assert isinstance(actual, dict) and actual.keys() == expected.keys(), err_msg
        actual, expected = [actual[key] for key in expected], list(expected.values())
    if type(expected) in (list, tuple):
        assert type(actual) is type(expected) and len(actual) == len(expected), err_msg
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, tol, scale=scale, err_msg=err_msg)
        return
    assert jax.tree.structure(actual) == jax.tree.structure(expected), err_msg
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        _assert_arrays_close(a, b, tol, scale, err_msg)


def _tolerance_of(x: Any) -> float:
    is_array = isinstance(x, (jax.Array, np.ndarray))
    return TOLERANCES.get(x.dtype.name, 1e-10) if is_array else TOLERANCES["float32"]


def _assert_arrays_close(a: Any, b: Any, tol: float | None, scale: float | None, err: str) -> None:
    if isinstance(b, str):
        assert a == b, err
        return
    if tol is None:
        tol = max(_tolerance_of(a), _tolerance_of(b))
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind in "biu" and b.dtype.kind in "biu":
        np.testing.assert_array_equal(a, b, err)
        return
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    if scale is None:
        largest = np.max(np.abs(b), initial=0, where=np.isfinite(b))
        atol = min(tol * max(largest, 1), max(tol, SMALL) * largest + FLOOR)
    else:
        atol = tol * scale
    np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=err)
