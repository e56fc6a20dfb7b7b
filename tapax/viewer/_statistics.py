"""The statistics of captured arrays, and the unit and scale with which the page shows them."""

from __future__ import annotations

import numpy as np

from tapax._results.iterations import rms
from tapax.monitoring._units import base_statistic
from tapax.viewer._format import Scale

BINS = 64
"""The number of bins of the histogram of a captured array."""
_UNITS = {"zeros": "of elements", "nonfinite": "elements"}
_LINEAR = {"zeros", "nonfinite"}
_DIVERGING = {"mean", "min", "max", "sum", "last", "cosine"}


def unit_of(stat: str) -> str:
    """Return the unit of a statistic in words; empty if it is the unit of the value."""
    return _UNITS.get(base_statistic(stat), "")


def scale_of(stat: str, numbers: np.ndarray) -> Scale:
    """Choose the scale on which the page first shows a statistic."""
    base = base_statistic(stat)
    if base in _LINEAR:
        return "linear"
    finite = numbers[np.isfinite(numbers)]
    if base in _DIVERGING and (finite < -1e-40).any():
        return "diverging"
    return "log" if (finite > 0).any() else "linear"


def describe(array: np.ndarray) -> dict[str, float]:
    """Compute statistics of the elements of an array, as NumPy does; a mean may be NaN."""
    x = np.abs(array) if np.iscomplexobj(array) else array
    x = x.astype(np.float64)
    finite = x[np.isfinite(x)]
    return {
        "rms": rms(x),
        "mean": float(x.mean()) if finite.size == x.size else float("nan"),
        "min": float(x.min()) if x.size else float("nan"),
        "max": float(x.max()) if x.size else float("nan"),
        "zeros": float(np.mean(x == 0)),
        "nonfinite": float(x.size - finite.size),
    }


def count_bins(array: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the counts and edges of a histogram of the finite elements, or None without any."""
    x = (np.abs(array) if np.iscomplexobj(array) else array).astype(np.float64).ravel()
    x = x[np.isfinite(x)]
    if not x.size:
        return None
    low, high = x.min(), x.max()
    scale = 4.0 if max(-low, high) > 1e300 else 1.0  # the width of all bins must be finite
    x, low, high = x / scale, low / scale, high / scale
    room = BINS * np.spacing(max(-low, high))  # neighbouring edges must be two numbers
    if high - low < room:
        width = max(abs(low) * 1e-3, room) if low or high else 1.0
        low, high = low - width, high + width
    counts, edges = np.histogram(x, BINS, (low, high))
    largest = np.finfo(np.float64).max / scale
    return counts, np.clip(edges, -largest, largest) * scale
