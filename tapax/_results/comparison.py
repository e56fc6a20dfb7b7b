"""Comparison of two arrays: how far apart they are, and where.

The *scale* of two numbers is the largest of their magnitudes and of the mean magnitude of the two
arrays. Errors are relative to the scale: the rounding error of a sum is proportional to its terms,
not to the sum, which is small if they cancel. The arrays of a loop have a mean for each iteration.

A *unit in the last place* is the distance between neighbouring numbers of a type, at the scale, in
the coarser of the two types: 2**-7 between 1 and 2 in bfloat16. For integers it is one.

>>> one, other = np.array([1.0, 8.0], np.float32), np.array([1.0, 9.0], "bfloat16")
>>> found = compare_arrays(one, other, Tolerance(ulps=4.0))
>>> found.absolute, found.ulps, found.index, bool(found.differs)
(1.0, 16.0, (1,), True)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

_TILE = 1 << 20
"""The number of elements to compare at a time, as float64."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest error: `atol`, plus `rtol` times the scale, plus `ulps` units in the last place.

    Integers and booleans must be equal.
    """

    rtol: float = 0.0
    atol: float = 0.0
    ulps: float = 0.0

    def __str__(self) -> str:
        parts = [f"{name}={x:g}" for name, x in (("rtol", self.rtol), ("atol", self.atol)) if x]
        if self.ulps:
            units = "unit" if self.ulps == 1 else "units"
            parts.append(f"{self.ulps:g} {units} in the last place of the coarser type")
        return " + ".join(parts) or "none"


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayComparison:
    """The largest errors of two arrays, over all elements.

    `index` is the element with the largest absolute error; None if the arrays are equal. `differs`
    and `ulps_by_iteration` have the axes of the loops, and no others. If only one of two numbers is
    NaN or infinite, their errors are infinite.
    """

    absolute: float
    relative: float
    ulps: float
    index: tuple[int, ...] | None
    differs: np.ndarray
    ulps_by_iteration: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The errors of some elements."""

    absolute: np.ndarray
    relative: np.ndarray
    ulps: np.ndarray
    beyond: np.ndarray


def compare_arrays(
    a: np.ndarray, b: np.ndarray, tolerance: Tolerance, loop_axes: Sequence[int] = ()
) -> ArrayComparison:
    """Compare two arrays of one shape. NaN equals NaN, and an infinity equals itself."""
    order = [*loop_axes, *(axis for axis in range(a.ndim) if axis not in loop_axes)]
    shape = [a.shape[axis] for axis in order]
    loops = shape[: len(loop_axes)]
    rows, columns = math.prod(loops), math.prod(shape[len(loop_axes) :])
    a, b = (_widened(x).transpose(order).reshape(rows, columns) for x in (a, b))
    precision = _precision_of(a.dtype, b.dtype)
    tiles = list(_tiles(rows, columns))
    mean = np.zeros((rows, 1))
    for tile in tiles:
        for x in (a[tile], b[tile]):
            size = np.abs(_as_float(x))
            finite = np.where(np.isfinite(size), size, 0.0)
            mean[tile[0], 0] += finite.sum(1) / (2 * columns)
    differs, by_row = np.zeros(rows, bool), np.zeros(rows)
    absolute = relative = ulps = 0.0
    worst = None
    for tile in tiles:
        found = _compare(a[tile], b[tile], mean[tile[0]], precision, tolerance)
        differs[tile[0]] |= found.beyond.any(1)
        by_row[tile[0]] = np.maximum(by_row[tile[0]], found.ulps.max(1))
        relative, ulps = max(relative, found.relative.max()), max(ulps, found.ulps.max())
        if found.absolute.max() > absolute:
            absolute = found.absolute.max()
            row, column = np.unravel_index(found.absolute.argmax(), found.absolute.shape)
            worst = (tile[0].start + row) * columns + tile[1].start + column
    index = None
    if worst is not None:
        moved = np.unravel_index(worst, shape)
        index = tuple(int(moved[order.index(axis)]) for axis in range(len(order)))
    return ArrayComparison(
        float(absolute),
        float(relative),
        float(ulps),
        index,
        differs.reshape(loops),
        by_row.reshape(loops),
    )


def coarser_type(a: Any, b: Any) -> Any:
    """Return the type whose numbers are further apart; integers are finer than any float."""
    inexact = [dtype for dtype in (a, b) if jnp.issubdtype(dtype, np.inexact)]
    return min(inexact or [a], key=lambda dtype: _finfo(dtype).nmant if inexact else 0)


def _finfo(dtype: Any) -> Any:
    return jnp.finfo(dtype)


def _precision_of(a: Any, b: Any) -> tuple[int, int] | None:
    """Return the mantissa bits and the least exponent of the coarser type; None for integers."""
    coarser = coarser_type(a, b)
    if not jnp.issubdtype(coarser, np.inexact):
        return None
    return int(_finfo(coarser).nmant), int(_finfo(coarser).minexp)


def _widened(x: np.ndarray) -> np.ndarray:
    """Convert integers of fewer than eight bits, which NumPy lacks, to int64."""
    if jnp.issubdtype(x.dtype, np.integer) and x.dtype.kind not in "iu":
        return x.astype(np.int64)
    return x


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    if not columns:
        return
    height = max(1, _TILE // columns)
    for row in range(0, rows, height):
        for column in range(0, columns, _TILE):
            yield slice(row, row + height), slice(column, column + _TILE)


def _as_float(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, np.complexfloating) else np.float64)


def _compare(
    a: np.ndarray,
    b: np.ndarray,
    mean: np.ndarray,
    precision: tuple[int, int] | None,
    tolerance: Tolerance,
) -> _Tile:
    x, y = _as_float(a), _as_float(b)
    with np.errstate(all="ignore"):
        error = np.abs(x - y)
        scale = np.maximum(np.maximum(np.abs(x), np.abs(y)), mean)
        if precision is None:
            equal = a == b
            # The difference of two large integers may round to zero in float64.
            error = np.where(equal, 0.0, np.maximum(error, 1.0))
            return _Tile(error, _divide(error, scale), error, ~equal)
        equal = (x == y) | (np.isnan(x) & np.isnan(y))
        one_is_finite = ~equal & ~(np.isfinite(x) & np.isfinite(y))
        error = np.where(equal, 0.0, np.where(one_is_finite, np.inf, error))
        digits, least = precision
        unit = np.ldexp(1.0, np.maximum(np.frexp(scale)[1] - 1, least) - digits)
        allowed = tolerance.atol + tolerance.rtol * scale + tolerance.ulps * unit
        beyond = (error > 0) & ~(error <= np.where(np.isfinite(scale), allowed, 0.0))
    return _Tile(error, _divide(error, scale), _divide(error, unit), beyond)


def _divide(error: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Divide an error, so that a zero error gives zero and an infinite error gives infinity."""
    with np.errstate(all="ignore"):
        return np.where(error > 0, np.where(np.isinf(error), np.inf, error / by), 0.0)
