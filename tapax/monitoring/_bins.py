"""Bins of histograms for packages that need finite edges."""

from __future__ import annotations

import numpy as np

from tapax.monitoring._records import Histogram


def count_equally(numbers: np.ndarray) -> Histogram:
    """Count finite numbers in bins of equal width, or in one bin if NumPy cannot divide them.

    >>> count_equally(np.array([1e38, 1e38])).counts
    array([2.])
    """
    numbers = np.clip(numbers, -1e300, 1e300)  # so that the width of their range is finite, too
    try:
        counts, edges = np.histogram(numbers, bins=64)
    except ValueError:
        margin = np.abs(numbers).max() / 64
        counts, edges = [numbers.size], [numbers.min() - margin, numbers.max() + margin]
    return Histogram(np.asarray(counts, np.float64), np.asarray(edges))


def close_edges(edges: np.ndarray) -> np.ndarray:
    """Replace infinite edges, so that their bins are as wide as the neighbouring bins."""
    edges = edges.copy()
    if not np.isfinite(edges[-1]):
        edges[-1] = 2 * edges[-2] - edges[-3] if len(edges) > 2 else edges[-2] + 1
    if not np.isfinite(edges[0]):
        edges[0] = 2 * edges[1] - edges[2] if len(edges) > 2 else edges[1] - 1
    return edges
