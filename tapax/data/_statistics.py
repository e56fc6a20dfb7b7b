"""Statistics of rows, which the device measures for each batch and the host merges.

Rows with a NaN or an infinity are counted, and excluded from all other statistics. The host merges
batches and units in order, in 64 bits, so that the result does not depend on the workers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax._jax import Value
from tapax.data._shard_format import dtype_of

NUMBERS = ("rows", "nonfinite", "overflowed", "norm_sum", "largest")
"""The fields of `Statistics` that are numbers; `mean` and `squares` have the shape of a row."""


_UNITS = {"float32": 2.0**100, "float64": 2.0**1000}
"""The largest unit of measurement, by dtype; beyond it, the reciprocal is not a normal number."""


def measure_rows(x: Value, dtype: str, mask: Value | None) -> dict[str, Value]:
    """Measure the rows of a site that `mask` keeps, before they are converted to `dtype`.

    The unit of norms is a power of two near the largest magnitude, so that no square overflows.
    Means and squares have `units`, one for each element of a row: a huge element must not hide the
    variance of the others. `Statistics.measured` converts the result.
    """
    wide = _widen(x)
    axes = tuple(range(1, x.ndim))
    kept = jnp.ones(x.shape[:1], bool) if mask is None else mask
    # The largest magnitude of a row also says whether the row is finite.
    magnitudes = jnp.abs(wide).max(axes, initial=0)
    finite = kept & jnp.isfinite(magnitudes)
    count = finite.sum()
    largest = jnp.where(finite, magnitudes, 0).max(initial=0)
    unit = _unit_near(largest)
    norms = jnp.sqrt(jnp.square(wide * (1 / unit)).sum(axes))
    mean, squares, units = _measure_elements(x, finite)
    return {
        "rows": count,
        "nonfinite": kept.sum() - count,
        "overflowed": (finite & (magnitudes > _largest_stored(wide, dtype))).sum(),
        "norm_sum": jnp.where(finite, norms, 0).sum(),
        "largest": largest,
        "mean": mean,
        "squares": squares,
        "unit": unit,
        "units": units,
    }


def _unit_near(largest: Value) -> Value:
    """Return a power of two near each of some magnitudes, whose reciprocal is a normal number."""
    most = _UNITS[largest.dtype.name]
    exponent = jnp.frexp(jnp.clip(largest, 1 / most, most))[1] - 1
    return jnp.ldexp(jnp.ones_like(largest), exponent)


def _widen(x: Value) -> Value:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _measure_elements(x: Value, used: Value) -> tuple[Value, Value, Value]:
    """Return the mean of each element over the `used` rows, and its squared distances from it.

    The third array has the units of both. A CPU takes half the time without the selection of rows,
    which is needed only if some are not finite. A GPU selects for free, but stops for a branch.
    """

    def measure_some(x: Value, used: Value) -> tuple[Value, Value, Value]:
        chosen = used.reshape(-1, *(1 for _ in x.shape[1:]))
        return _measure_where(x, used.sum(), lambda each: jnp.where(chosen, each, 0))

    def measure_all(x: Value, used: Value) -> tuple[Value, Value, Value]:
        return _measure_where(x, jnp.asarray(len(x)), lambda each: each)

    def choose(x: Value, used: Value) -> tuple[Value, Value, Value]:
        return lax.cond(used.all(), measure_all, measure_some, x, used)

    return lax.platform_dependent(x, used, cpu=choose, default=measure_some)


def _measure_where(
    x: Value, count: Value, select: Callable[[Value], Value]
) -> tuple[Value, Value, Value]:
    wide = _widen(x)
    units = _unit_near(select(jnp.abs(wide)).max(0, initial=0))
    # With one scale for both, XLA would keep a scaled copy of the rows on a CPU.
    first, second = lax.optimization_barrier((1 / units, 1 / units))
    mean = select(wide * first).sum(0) / jnp.maximum(count, 1).astype(wide.dtype)
    return mean, select(jnp.square(wide * second - mean)).sum(0), units


def _largest_stored(wide: Value, dtype: str) -> float:
    """Return the magnitude up to which a conversion to `dtype` rounds to a finite number.

    Beyond it, some conversions return NaN or an infinity, and others the largest number.
    """
    if not jnp.issubdtype(dtype_of(dtype), jnp.floating):
        return math.inf
    limit = jnp.finfo(dtype)
    largest = float(limit.max)
    if largest >= float(jnp.finfo(wide.dtype).max):
        return math.inf
    # Halfway to the next number that `dtype` would have; the tie goes to one of the two.
    middle = largest + float(limit.eps) * 2.0 ** math.floor(math.log2(largest)) / 2
    with np.errstate(over="ignore"):
        is_rounded_down = float(np.asarray(middle).astype(dtype_of(dtype))) == largest
    return middle if is_rounded_down else float(np.nextafter(wide.dtype.type(middle), 0))


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the rows of a site, which `harvest` measures before it converts the rows.

    Attributes:
        rows: The number of finite rows, from which all other statistics except `nonfinite` come.
        nonfinite: The number of rows with a NaN or an infinity.
        overflowed: The number of rows with a number too large for the dtype in which it is stored.
        norm_sum: The sum of the Euclidean norms of the rows.
        largest: The largest magnitude of an element.
        mean: The mean of each element of a row.
        squares: The sum of squared distances from the mean, for each element of a row.

    Example:
        >>> import tempfile, jax.numpy as jnp, tapax
        >>> same = lambda x: tapax.sow(x, "h")
        >>> x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
        >>> acts = tapax.harvest(same, [x], to=tempfile.mkdtemp())
        >>> found = acts.stats["h"]
        >>> found.mean.tolist(), found.var.tolist(), found.std.tolist(), found.norm
        ([1.5, 2.0], [2.25, 4.0], [1.5, 2.0], 2.5)
        >>> found.numbers
        {'rows': 2, 'nonfinite': 0, 'overflowed': 0, 'norm_sum': 5.0, 'largest': 4.0}
    """

    rows: int
    nonfinite: int
    overflowed: int
    norm_sum: float
    largest: float
    mean: np.ndarray
    squares: np.ndarray

    @classmethod
    def measured(cls, parts: Mapping[str, Any]) -> Statistics:
        """Convert the statistics that the device measured for one batch.

        Args:
            parts: The numbers and arrays that `measure_rows` returned, by name, in their unit.

        Returns:
            The statistics of the rows.

        Raises:
            KeyError: If `parts` lacks a number or an array.

        Example:
            >>> import jax.numpy as jnp
            >>> x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
            >>> Statistics.measured(measure_rows(x, "float32", None)).norm
            2.5
        """
        units = np.float64(parts["units"])
        with np.errstate(over="ignore"):  # in float64, squares may still be too large
            scaled = {
                "norm_sum": np.float64(parts["norm_sum"]) * np.float64(parts["unit"]),
                "mean": np.float64(parts["mean"]) * units,
                "squares": np.float64(parts["squares"]) * units * units,
            }
        return cls.of({**parts, **scaled})

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> Statistics:
        """Make statistics from the numbers and arrays in a shard.

        Args:
            parts: The values of all fields, by name.

        Returns:
            The statistics, with arrays of float64.

        Raises:
            KeyError: If `parts` lacks a field.

        Example:
            >>> import numpy as np
            >>> numbers = dict(rows=1, nonfinite=0, overflowed=0, norm_sum=5.0, largest=4.0)
            >>> Statistics.of({**numbers, "mean": np.array([3, 4]), "squares": np.zeros(2)}).norm
            5.0
        """
        return cls(
            rows=int(parts["rows"]),
            nonfinite=int(parts["nonfinite"]),
            overflowed=int(parts["overflowed"]),
            norm_sum=float(parts["norm_sum"]),
            largest=float(parts["largest"]),
            mean=np.asarray(parts["mean"], np.float64),
            squares=np.asarray(parts["squares"], np.float64),
        )

    @property
    def var(self) -> np.ndarray:
        """The variance of each element of a row."""
        return self.squares / max(self.rows, 1)

    @property
    def std(self) -> np.ndarray:
        """The standard deviation of each element of a row."""
        return np.sqrt(self.var)

    @property
    def norm(self) -> float:
        """The mean Euclidean norm of a row."""
        return self.norm_sum / max(self.rows, 1)

    @property
    def numbers(self) -> dict[str, int | float]:
        """The fields that are numbers, by name, as in the header of a shard."""
        return {name: getattr(self, name) for name in NUMBERS}

    def emptied(self) -> Statistics:
        """Make the statistics of no rows, with arrays of equal shape.

        Returns:
            Statistics with zeros, whose merge with others leaves the others as they are.

        Example:
            >>> import numpy as np
            >>> Statistics(1, 0, 0, 5.0, 4.0, np.array([3.0, 4.0]), np.zeros(2)).emptied().rows
            0
        """
        nothing = np.zeros_like(self.mean)
        return Statistics(0, 0, 0, 0.0, 0.0, nothing, nothing)

    def merge(self, other: Statistics) -> Statistics:
        """Combine the statistics of two sets of rows (Chan, Golub and LeVeque, 1979).

        Args:
            other: The statistics of other rows of the site.

        Returns:
            The statistics of all rows.

        Raises:
            ValueError: If the rows of `other` have another shape.

        Example:
            >>> import numpy as np
            >>> one = Statistics(1, 0, 0, 5.0, 4.0, np.array([3.0, 4.0]), np.zeros(2))
            >>> zero = Statistics(1, 0, 0, 0.0, 0.0, np.zeros(2), np.zeros(2))
            >>> both = one.merge(zero)
            >>> both.rows, both.mean.tolist(), both.var.tolist()
            (2, [1.5, 2.0], [2.25, 4.0])
        """
        rows = self.rows + other.rows
        share = other.rows / max(rows, 1)
        apart = other.mean - self.mean
        return Statistics(
            rows=rows,
            nonfinite=self.nonfinite + other.nonfinite,
            overflowed=self.overflowed + other.overflowed,
            norm_sum=self.norm_sum + other.norm_sum,
            largest=max(self.largest, other.largest),
            mean=self.mean + apart * share,
            squares=self.squares + other.squares + np.square(apart) * (self.rows * share),
        )


def merge_all(parts: Iterable[Statistics]) -> Statistics:
    """Merge the statistics of batches or units, in the given order."""
    return functools.reduce(Statistics.merge, parts)
