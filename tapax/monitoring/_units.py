"""Merging of the numbers of several units into one, for plots and the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tapax._results.iterations import rms
from tapax.monitoring._records import Histogram


def base_statistic(stat: str) -> str:
    """Return the name of a statistic without its arguments: `rms` for `rms.total`."""
    return stat.partition(".total")[0].partition("(")[0]


_MERGES: dict[str, Callable[[np.ndarray], Any]] = {
    "rms": rms,
    "norm": lambda x: rms(x) * np.sqrt(x.size),
    "sum": np.sum,
    "nonfinite": np.sum,
    "min": np.min,
    "max": np.max,
}


def merge_units(stat: str, number: Any) -> float | Histogram | None:
    """Merge the numbers of several units into one number or histogram; None without numbers.

    The merged rms, norm, sum, minimum or maximum is that of all units; other statistics are
    averaged.
    """
    if isinstance(number, Histogram):
        counts, edges = (np.asarray(x, np.float64) for x in (number.counts, number.edges))
        return Histogram(counts.reshape(-1, counts.shape[-1]).sum(0), edges)
    array = np.asarray(number)
    if array.dtype.kind not in "fiub" or not array.size:
        return None
    return float(_MERGES.get(base_statistic(stat), np.mean)(array.astype(np.float64)))
