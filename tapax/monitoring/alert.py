"""Alerts: rules by which a monitor or a stream warns, layer by layer.

A rule names the statistics that it needs, and the monitor captures them even if it does not record
them. An alert goes off when a number passes its limit, and a second time only after the number has
returned within the limit. The monitor adds the alert to `Monitor.alerts`, passes it to the sinks
that have a method `alert`, and warns once for each rule and layer.

>>> import tapax
>>> alerts = [tapax.alert.nonfinite(), tapax.alert.above("**", grad_norm=1e3), tapax.alert.dead()]
>>> tapax.monitor(lambda x: tapax.sow(x, "h"), alerts=alerts).close()
"""

import dataclasses
import math
import numbers
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from tapax import reduce
from tapax._jax import Value
from tapax._sites import IfAny, Selection, check, flatten
from tapax.monitoring._records import AlertEvent
from tapax.reduce import Reducer

__all__ = ["AlertEvent", "AlertRule", "AlertWarning", "above", "below", "dead", "nonfinite"]


class AlertWarning(UserWarning):
    """The category of the warnings that alerts give.

    Example:
        >>> import warnings, jax.numpy as jnp, tapax
        >>> step = lambda x: tapax.sow(jnp.log(x), "h")
        >>> with warnings.catch_warnings(record=True) as found:
        ...     warnings.simplefilter("always", tapax.alert.AlertWarning)
        ...     with tapax.monitor(step, alerts=tapax.alert.nonfinite()) as watched:
        ...         x = watched(jnp.zeros(2))
        >>> [str(each.message) for each in found if each.category is tapax.alert.AlertWarning]
        ['step 0: the value of h has 2 numbers that are NaN or Inf.']
    """


@dataclasses.dataclass(frozen=True)
class Limit:
    """The limit of a statistic of the values or the gradients of some sites.

    `rule` is the function that made the limit: `nonfinite`, `above`, `below` or `dead`. `kind` is
    `value` or `grad`.
    """

    rule: str
    kind: str
    selection: Selection
    stat: str
    reducer: Reducer
    limit: float = 0.0

    def check(self, step: int, label: str, number: Any) -> AlertEvent | None:
        """Return the alert of the number of a site at a step; None if it is within the limit."""
        number = float(number)
        fault = self._fault(number)
        if fault is None:
            return None
        what = "gradient" if self.kind == "grad" else "value"
        message = f"step {step}: the {what} of {label} has {fault}."
        return AlertEvent(step, label, f"{self.kind}_{self.stat}", number, message)

    def _fault(self, number: float) -> str | None:
        """Describe the fault of a number, as the end of a sentence; None for a good number."""
        match self.rule:
            case "nonfinite" if number:
                numbers = "number that is" if number == 1 else "numbers that are"
                return f"{number:.0f} {numbers} NaN or Inf"
            case "dead" if number >= self.limit:
                return f"{100 * number:.3g}% dead units, zero in the whole batch"
            case "above" | "below" if math.isnan(number):
                return f"{self.stat} NaN, which cannot be compared with the limit of {self.limit:g}"
            case "above" if number > self.limit:
                return f"{self.stat} {number:.4g}, above the limit of {self.limit:g}"
            case "below" if number < self.limit:
                return f"{self.stat} {number:.4g}, below the limit of {self.limit:g}"
        return None


@dataclasses.dataclass(frozen=True)
class AlertRule:
    """A rule that goes off when a number passes any of its limits.

    `nonfinite`, `above`, `below` and `dead` make rules.

    Attributes:
        limits: The limits, each with a statistic and a selection of sites.

    Example:
        >>> import tapax
        >>> rule = tapax.alert.above("**", grad_norm=1e3, value_rms=50.0)
        >>> [(limit.kind, limit.stat, limit.limit) for limit in rule.limits]
        [('grad', 'norm', 1000.0), ('value', 'rms', 50.0)]
    """

    limits: tuple[Limit, ...]


def nonfinite(at: Selection = "**") -> AlertRule:
    """Make a rule that warns of values and gradients with a NaN or an infinity.

    Args:
        at: Selects the sites, as in `tapax.capture`.

    Returns:
        A rule for `tapax.monitor` and `tapax.stream`.

    Raises:
        TypeError: If `at` is not a selection.

    Example:
        >>> import warnings, jax.numpy as jnp, tapax
        >>> step = lambda x: tapax.sow(jnp.log(x), "h")
        >>> with warnings.catch_warnings(action="ignore"):
        ...     with tapax.monitor(step, alerts=tapax.alert.nonfinite()) as watched:
        ...         x = watched(jnp.zeros(2))
        >>> watched.alerts[0].message
        'step 0: the value of h has 2 numbers that are NaN or Inf.'
    """
    at = check(at, "at")
    both = (("value", at), ("grad", _make_optional(at)))
    name, reducer = "nonfinite", reduce.nonfinite
    return AlertRule(tuple(Limit(name, kind, x, name, reducer) for kind, x in both))


def above(at: Selection, /, **limits: float) -> AlertRule:
    """Make a rule that warns of statistics above a limit. A NaN is above any limit.

    Args:
        at: Selects the sites, as in `tapax.capture`.
        **limits: The limit of each statistic, such as `grad_norm=1e3`. A keyword is `value_` or
            `grad_`, followed by `min`, `max`, or one of the reducers `rms`, `norm`, `mean`, `var`,
            `sum`, `zeros` and `nonfinite`; or `grad_`, followed by `cosine` or `update_ratio`.

    Returns:
        A rule for `tapax.monitor` and `tapax.stream`.

    Raises:
        TypeError: If `at` is not a selection, there are no limits, a keyword is not a statistic, or
            a limit is not a number.

    Example:
        >>> import warnings, jax.numpy as jnp, tapax
        >>> step, rule = lambda x: tapax.sow(2 * x, "h"), tapax.alert.above("**", value_rms=50.0)
        >>> with warnings.catch_warnings(action="ignore"):
        ...     with tapax.monitor(step, every=1, alerts=rule) as watched:
        ...         results = [watched(jnp.full(3, x)) for x in (1.0, 30.0)]
        >>> [event.message for event in watched.alerts]
        ['step 1: the value of h has rms 60, above the limit of 50.']
    """
    return AlertRule(tuple(_make_limits("above", at, limits)))


def below(at: Selection, /, **limits: float) -> AlertRule:
    """Make a rule that warns of statistics below a limit. A NaN is below any limit.

    Args:
        at: Selects the sites, as in `tapax.capture`.
        **limits: The limit of each statistic, with the keywords of `above`.

    Returns:
        A rule for `tapax.monitor` and `tapax.stream`.

    Raises:
        TypeError: If `at` is not a selection, there are no limits, a keyword is not a statistic, or
            a limit is not a number.

    Example:
        >>> import warnings, jax.numpy as jnp, tapax
        >>> step, rule = lambda x: tapax.sow(0 * x, "h"), tapax.alert.below("h", value_rms=1e-6)
        >>> with warnings.catch_warnings(action="ignore"):
        ...     with tapax.monitor(step, alerts=rule) as watched:
        ...         x = watched(jnp.ones(3))
        >>> watched.alerts[0].message
        'step 0: the value of h has rms 0, below the limit of 1e-06.'
    """
    return AlertRule(tuple(_make_limits("below", at, limits)))


def dead(fraction: float = 0.9, at: Selection = "**") -> AlertRule:
    """Make a rule that warns of values with many dead units.

    A unit is an index of the last axis. It is dead if it is zero in the whole batch.

    Args:
        fraction: The smallest fraction of dead units that sets the alert off.
        at: Selects the sites, as in `tapax.capture`.

    Returns:
        A rule for `tapax.monitor` and `tapax.stream`.

    Raises:
        ValueError: If `fraction` is not a number above 0 and at most 1.
        TypeError: If `at` is not a selection.

    Example:
        >>> import warnings, jax, jax.numpy as jnp, tapax
        >>> step = lambda x: tapax.sow(jax.nn.relu(x), "h")
        >>> with warnings.catch_warnings(action="ignore"):
        ...     with tapax.monitor(step, alerts=tapax.alert.dead(0.5)) as watched:
        ...         x = watched(jnp.array([[-1.0, 2.0], [-3.0, 4.0]]))
        >>> watched.alerts[0].message
        'step 0: the value of h has 50% dead units, zero in the whole batch.'
    """
    number = isinstance(fraction, numbers.Real) and not isinstance(fraction, bool)
    if not number or not 0 < fraction <= 1:
        raise ValueError(f"`fraction` must be a number above 0 and at most 1, but is {fraction!r}.")
    return AlertRule((Limit("dead", "value", check(at, "at"), "dead", _DEAD, float(fraction)),))


def _make_optional(at: Selection) -> Selection:
    """Allow the sites of a selection to have no gradients, even if it names them exactly."""
    return tuple(IfAny(part) for part in flatten(at))


def _alive(x: Value) -> Any:
    # A scalar has no units, so it never counts as dead.
    return jnp.any(x != 0, tuple(range(x.ndim - 1))) if x.ndim else jnp.array(True)


_DEAD = Reducer(
    init=lambda x: jnp.zeros(x.shape[-1:], bool) if x.ndim else jnp.array(True),
    update=lambda state, x: state | _alive(x),
    combine=jnp.logical_or,
    finish=lambda state: jnp.mean(~state, dtype=jnp.float32) if state.size else jnp.float32(0),
    name="dead",
)

_STATS: dict[str, Reducer] = {
    name: getattr(reduce, name)
    for name in ("rms", "norm", "mean", "var", "sum", "zeros", "nonfinite")
} | {"min": reduce.minmax, "max": reduce.minmax}
_PAIRED = {"cosine": reduce.cosine, "update_ratio": reduce.update_ratio}


def _make_limits(function: str, at: Selection, limits: dict[str, float]) -> Iterator[Limit]:
    at = check(at, "at")
    if not limits:
        raise TypeError(
            f"`{function}` takes limits as keywords, such as grad_norm=1e3, but was given none."
        )
    for keyword, limit in limits.items():
        kind, _, stat = keyword.partition("_")
        known = {"value": _STATS, "grad": _STATS | _PAIRED}.get(kind, {})
        if stat not in known:
            raise TypeError(
                f"`{function}` was given the limit {keyword!r}, but a limit is 'value_' or 'grad_' "
                f"and one of {', '.join(_STATS)}; or 'grad_' and one of {', '.join(_PAIRED)}."
            )
        if isinstance(limit, bool) or not isinstance(limit, numbers.Real) or math.isnan(limit):
            raise TypeError(f"`{function}` was given {keyword}={limit!r}, but a limit is a number.")
        yield Limit(function, kind, at, stat, known[stat], float(limit))
