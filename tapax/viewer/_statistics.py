"""The statistics of captured arrays, and how the page shows a statistic: its unit and scale."""

from __future__ import annotations

import numpy as np

from tapax._results.iterations import rms
from tapax.monitoring._units import base_statistic
from tapax.viewer._format import Scale

BINS = 64
"""The bins of the histogram of a captured array."""
_UNITS = {"zeros": "of elements", "nonfinite": "elements"}
_LINEAR = {"zeros", "nonfinite"}
_DIVERGING = {"mean", "min", "max", "sum", "last", "cosine"}


def unit_of(stat: str) -> str:
    """The unit of a statistic in words; empty if it has that of the value."""
    return _UNITS.get(base_statistic(stat), "")


def scale_of(stat: str, numbers: np.ndarray) -> Scale:
    """The scale on which a statistic is shown first."""
    base = base_statistic(stat)
    if base in _LINEAR:
        return "linear"
    finite = numbers[np.isfinite(numbers)]
    if base in _DIVERGING and (finite < -1e-40).any():
        return "diverging"
    return "log" if (finite > 0).any() else "linear"


def describe(array: np.ndarray) -> dict[str, float]:
    """The statistics of the elements of an array, by name. Extremes are of finite elements."""
    x = np.abs(array) if np.iscomplexobj(array) else array
    x = x.astype(np.float64)
    finite = x[np.isfinite(x)]
    return {
        "rms": rms(x),
        "mean": float(x.mean()) if finite.size == x.size else float("nan"),
        "min": float(finite.min(initial=np.inf)),
        "max": float(finite.max(initial=-np.inf)),
        "zeros": float(np.mean(x == 0)),
        "nonfinite": float(x.size - finite.size),
    }


def count_bins(array: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Counts and edges of a histogram of the finite elements; None if there are none."""
    x = (np.abs(array) if np.iscomplexobj(array) else array).astype(np.float64).ravel()
    x = x[np.isfinite(x)]
    if not x.size:
        return None
    low, high = x.min(), x.max()
    if low == high:
        width = abs(low) * 1e-3 or 1.0
        low, high = low - width, high + width
    return np.histogram(x, BINS, (low, high))
