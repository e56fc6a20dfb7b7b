"""Alerts: rules by which a monitor warns, layer by layer.

>>> import tapax
>>> alerts = [tapax.alert.nonfinite(), tapax.alert.above("**", grad_norm=1e3), tapax.alert.dead()]

A rule names the statistics that it needs, and the monitor captures them, whether it records them or
not. An alert goes off when a number passes its limit, and not again before the number is back: it
is added to `monitor.alerts`, goes to the sinks that have a method `alert`, and warns, once for each
rule and layer.
"""

import dataclasses
import math
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
    """The category of the warnings of alerts."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """A statistic of the values or the gradients of some sites, and when it is too much.

    `rule` is the name of the function that made it: `nonfinite`, `above`, `below` or `dead`.
    """

    rule: str
    kind: str
    selection: Selection
    stat: str
    reducer: Reducer
    limit: float = 0.0

    def check(self, step: int, label: str, number: Any) -> AlertEvent | None:
        """The alert that goes off for the number of a site at a step, if any."""
        number = float(number)
        fault = self._fault(number)
        if fault is None:
            return None
        what = "gradient" if self.kind == "grad" else "value"
        message = f"step {step}: the {what} of {label} has {fault}."
        return AlertEvent(step, label, f"{self.kind}_{self.stat}", number, message)

    def _fault(self, number: float) -> str | None:
        """The fault of a number, as the end of a sentence about it; None if it has none."""
        match self.rule:
            case "nonfinite" if number:
                numbers = "number that is" if number == 1 else "numbers that are"
                return f"{number:.0f} {numbers} NaN or Inf"
            case "dead" if number >= self.limit:
                return f"{100 * number:.3g}% dead units, zero in the whole batch"
            case "above" | "below" if math.isnan(number):
                within = f"within the limit of {self.limit:g}"
                return f"{self.stat} nan, which cannot be told to be {within}"
            case "above" if number > self.limit:
                return f"{self.stat} {number:.4g}, above the limit of {self.limit:g}"
            case "below" if number < self.limit:
                return f"{self.stat} {number:.4g}, below the limit of {self.limit:g}"
        return None


@dataclasses.dataclass(frozen=True)
class AlertRule:
    """A rule that goes off when any of its limits is passed."""

    limits: tuple[Limit, ...]


def nonfinite(at: Selection = "**") -> AlertRule:
    """Values and gradients that have a NaN or an Inf in them."""
    at = check(at, "at")
    both = (("value", at), ("grad", _make_optional(at)))
    name, reducer = "nonfinite", reduce.nonfinite
    return AlertRule(tuple(Limit(name, kind, x, name, reducer) for kind, x in both))


def above(at: Selection, /, **limits: float) -> AlertRule:
    """Statistics above a limit: `above("**", grad_norm=1e3, value_rms=50.0)`.

    A keyword is `value_` or `grad_` and the name of a reducer, or `min` or `max`. A NaN is above
    any limit.
    """
    return AlertRule(tuple(_make_limits("above", at, limits)))


def below(at: Selection, /, **limits: float) -> AlertRule:
    """Statistics below a limit: `below("**/mlp", grad_rms=1e-12)`. A NaN is below any limit."""
    return AlertRule(tuple(_make_limits("below", at, limits)))


def dead(fraction: float = 0.9, at: Selection = "**") -> AlertRule:
    """Values of which at least this fraction of units, along the last axis, is zero everywhere."""
    number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not number or not 0 < fraction <= 1:
        raise ValueError(f"`fraction` must be a number above 0 and at most 1, but is {fraction!r}.")
    return AlertRule((Limit("dead", "value", check(at, "at"), "dead", _DEAD, float(fraction)),))


def _make_optional(at: Selection) -> Selection:
    """The same sites, none of which must have a gradient, as one that is named must."""
    return tuple(IfAny(part) for part in flatten(at))


def _alive(x: Value) -> Any:
    # A single number is no unit: it is never taken for dead.
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
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or math.isnan(limit):
            raise TypeError(f"`{function}` was given {keyword}={limit!r}, but a limit is a number.")
        yield Limit(function, kind, at, stat, known[stat], float(limit))
