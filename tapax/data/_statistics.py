"""Statistics of rows, taken on the device for each batch and merged on the host.

Rows with a NaN or an infinity are counted, and left out of everything else. Batches are merged in
their order and units in theirs, with 64 bits, so the result does not depend on who harvested what.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tapax._jax import Value
from tapax.data._shard_format import dtype_of

NUMBERS = ("rows", "nonfinite", "overflowed", "norm_sum", "largest")
"""The parts that are single numbers; `mean` and `squares` have the shape of a row."""


_SCALES = 2.0**-100, 2.0**100
"""The smallest and the largest unit of norms: the reciprocals of others are not normal numbers."""


def measure_rows(x: Value, dtype: str, mask: Value | None) -> dict[str, Value]:
    """Measure the rows of a site that the mask keeps, before they are stored as `dtype`.

    Norms are in units of about the largest magnitude, so that no square overflows;
    `Statistics.measured` converts the result.
    """
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    axes = tuple(range(1, x.ndim))
    kept = jnp.ones(x.shape[:1], bool) if mask is None else mask
    # One pass over the rows tells their largest magnitudes and which are finite.
    magnitudes = jnp.abs(wide).max(axes, initial=0)
    finite = kept & jnp.isfinite(magnitudes)
    used = finite.reshape(-1, *(1 for _ in axes))
    count = finite.sum()
    largest = jnp.where(finite, magnitudes, 0).max(initial=0)
    norms = jnp.sqrt(jnp.square(wide / jnp.clip(largest, *_SCALES)).sum(axes))
    mean = jnp.where(used, wide, 0).sum(0) / jnp.maximum(count, 1).astype(wide.dtype)
    return {
        "rows": count,
        "nonfinite": kept.sum() - count,
        "overflowed": (finite & (magnitudes > _largest_stored(wide, dtype))).sum(),
        "scaled_norm_sum": jnp.where(finite, norms, 0).sum(),
        "largest": largest,
        "mean": mean,
        "squares": jnp.where(used, jnp.square(wide - mean), 0).sum(0),
    }


def _largest_stored(wide: Value, dtype: str) -> float:
    """The magnitude up to which numbers are rounded to a finite one of the type.

    Beyond it some conversions give NaN or an infinity, others the largest number.
    """
    if not jnp.issubdtype(dtype_of(dtype), jnp.floating):
        return math.inf
    limit = jnp.finfo(dtype)
    return min(float(limit.max) * (1 + float(limit.eps) / 4), float(jnp.finfo(wide.dtype).max))


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the rows of a site.

    `rows` counts the rows that everything else is about: those that are finite. `nonfinite` counts
    the others, and `overflowed` the rows with a number too large for the type in which it is
    stored. `squares` is the sum of squared distances from the mean, `norm_sum` the sum of the
    Euclidean norms of rows, `largest` the largest magnitude of an element.
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
        """Convert what `measure_rows` returned."""
        scale = np.clip(np.float64(parts["largest"]), *_SCALES)
        norm_sum = float(parts["scaled_norm_sum"]) * scale
        return cls.of({**parts, "norm_sum": norm_sum})

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> Statistics:
        """Convert what a shard holds: numbers, and arrays."""
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
        """The parts that are single numbers, for the header of a shard."""
        return {name: getattr(self, name) for name in NUMBERS}

    def emptied(self) -> Statistics:
        """Return the statistics of no rows."""
        nothing = np.zeros_like(self.mean)
        return Statistics(0, 0, 0, 0.0, 0.0, nothing, nothing)

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of the rows of both (Chan, Golub and LeVeque, 1979)."""
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
    """Merge the statistics of several batches or units, in their order."""
    return functools.reduce(Statistics.merge, parts)
