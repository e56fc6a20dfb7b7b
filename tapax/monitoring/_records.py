"""Records: the numbers of one watched step by name, and the alerts that went off in it."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of the numbers between each edge and the next."""

    counts: np.ndarray
    edges: np.ndarray


@dataclasses.dataclass(frozen=True)
class AlertEvent:
    """An alert that went off: the step, the site, the statistic, its number, and a sentence."""

    step: int
    site: str
    stat: str
    number: float
    message: str


Number: TypeAlias = "float | np.ndarray | Histogram"
Record: TypeAlias = "Mapping[str, Number]"


def split_name(name: str) -> tuple[str, str, str]:
    """The site, the kind and the statistic: `Net/mlp/value_rms` is ("Net/mlp", "value", "rms").

    A name of another form is the site; the kind and the statistic are then empty.
    """
    found = re.fullmatch(r"(.+)/(value|grad|param_grad|param|update)_([^/]+)", name)
    return (found[1], found[2], found[3]) if found else (name, "", "")


def as_floats(record: Record) -> dict[str, Number]:
    """Convert a record to floats, arrays of float64, and histograms of these."""
    return {name: _as_floats(number) for name, number in record.items()}


def _as_floats(number: Any) -> Number:
    if isinstance(number, float):
        return number
    if isinstance(number, Histogram):
        return Histogram(*(np.asarray(a, np.float64) for a in (number.counts, number.edges)))
    array = np.asarray(number, np.float64)
    return array if array.ndim else float(array)
