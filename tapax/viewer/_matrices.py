"""Matrices of the numbers of a subject: one for each kind and statistic, sites by steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tapax.viewer._blobs import Blobs
from tapax.viewer._format import EXACT_BYTES, MISSING, Of, Statistic
from tapax.viewer._statistics import scale_of, unit_of


class GrowingMatrix:
    """A float32 matrix [rows, columns] that grows in both directions; new elements are `MISSING`.

    The memory is ordered column by column, since a record fills a column.
    """

    def __init__(self) -> None:
        self._data = np.full((0, 0), MISSING, np.float32)
        self.rows = self.columns = 0

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the matrix, and drop the elements beyond it."""
        if columns > self._data.shape[0] or rows > self._data.shape[1]:
            capacity = tuple(
                max(old, new + new // 2) if new > old else old
                for old, new in zip(self._data.shape, (columns, rows), strict=True)
            )
            data = np.full(capacity, MISSING, np.float32)
            data[: self.columns, : self.rows] = self._data[: self.columns, : self.rows]
            self._data = data
        if columns < self.columns:
            self._data[columns : self.columns] = MISSING
        self.rows, self.columns = rows, columns

    @property
    def numbers(self) -> np.ndarray:
        """A writable view of the numbers, [rows, columns]."""
        return self._data[: self.columns, : self.rows].T


def as_float32(number: float) -> np.float32:
    """Round to float32: to infinity beyond its range, and to zero instead of `MISSING`."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(number)
    return np.float32(0) if rounded == np.float32(MISSING) else rounded


def add_statistics(
    blobs: Blobs, found: Mapping[tuple[Of, str], tuple[np.ndarray, np.ndarray]], n_sites: int
) -> list[Statistic]:
    """Add matrices by kind and statistic; `found` has the sites of their rows, and the numbers."""
    exact = sum(numbers.nbytes for _, numbers in found.values()) <= EXACT_BYTES
    statistics: list[Statistic] = []
    for (of, stat), (sites, numbers) in found.items():
        is_every = len(sites) == n_sites and np.array_equal(sites, np.arange(n_sites))
        matrix = blobs.add_matrix(numbers, None if is_every else sites, exact=exact)
        sample = numbers[:, :: max(1, numbers.shape[1] // 64)]
        statistics.append(
            {
                "of": of,
                "stat": stat,
                "unit": unit_of(stat),
                "scale": scale_of(stat, sample),
                "matrix": matrix,
            }
        )
    return statistics
