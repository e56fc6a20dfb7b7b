"""Records: the numbers of one watched step by name, and the alerts that went off in it."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from tapax._sites import wrong_type


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram:
    """A histogram in a record: the number of elements between each edge and the next.

    Attributes:
        counts: The count of each bin, along the last axis.
        edges: The edges of the bins, one more than there are bins. The first and the last may be
            infinite.

    Example:
        >>> import numpy as np, tapax
        >>> found = tapax.Histogram(counts=np.array([3.0, 1.0]), edges=np.array([0.0, 1.0, 2.0]))
        >>> log = tapax.Log()
        >>> log(0, {"Net/mlp/value_histogram": found})
        >>> log["Net/mlp/value_histogram"].counts.tolist()
        [[3.0, 1.0]]
    """

    counts: np.ndarray
    edges: np.ndarray


@dataclasses.dataclass(frozen=True)
class AlertEvent:
    """An alert that went off.

    Attributes:
        step: The step of the record.
        site: The name of the site, with the iteration for a site in a loop.
        stat: The statistic, such as `grad_norm`.
        number: The number that passed the limit.
        message: A sentence for the user.

    Example:
        >>> import warnings, jax.numpy as jnp, tapax
        >>> step, rule = lambda x: tapax.sow(2 * x, "h"), tapax.alert.above("h", value_max=3.0)
        >>> with warnings.catch_warnings(action="ignore"):
        ...     with tapax.monitor(step, alerts=rule) as watched:
        ...         x = watched(jnp.arange(3.0))
        >>> event = watched.alerts[0]
        >>> event.step, event.site, event.stat, event.number
        (0, 'h', 'value_max', 4.0)
        >>> event.message
        'step 0: the value of h has max 4, above the limit of 3.'
    """

    step: int
    site: str
    stat: str
    number: float
    message: str


Number: TypeAlias = "float | np.ndarray | Histogram"
Record: TypeAlias = "Mapping[str, Number]"


_NAME = re.compile(r"(.+)/(value|grad|param_grad|param|update)_([^/]+)", re.DOTALL)


def split_name(name: str) -> tuple[str, str, str]:
    """Split a name into site, kind and statistic: "Net/mlp", "value", "rms" of `Net/mlp/value_rms`.

    If the name has another form, the site is the whole name, and the kind and the statistic are
    empty.
    """
    found = _NAME.fullmatch(name)
    return (found[1], found[2], found[3]) if found else (name, "", "")


def as_floats(record: Record) -> dict[str, Number]:
    """Convert a record to floats, arrays of float64, and histograms of these."""
    return {name: _as_floats(name, number) for name, number in record.items()}


def _as_floats(name: str, number: Any) -> Number:
    if type(number) is float:
        return number
    if isinstance(number, Histogram):
        return Histogram(*(np.asarray(a, np.float64) for a in (number.counts, number.edges)))
    try:
        array = np.asarray(number, np.float64)
    except (TypeError, ValueError):
        raise wrong_type(f"A record has numbers by name, but {name!r} is", number) from None
    return array if array.ndim else float(array)
