"""Alerts: what a monitor is to warn of, by layer.

>>> import tapax
>>> alerts = [tapax.alert.nonfinite(), tapax.alert.above("**", grad_norm=1e3), tapax.alert.dead()]

An alert says what it has to know, and the monitor captures it, whether it is recorded or not. An
alarm is raised when something begins, and not again before it has ended: it goes to
`monitor.alarms`, to the sinks that have a method `alert`, and is warned about, once for each
alert and layer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from tapax import reduce
from tapax._sites.selections import Selection, check, flatten, is_exact, matches
from tapax.monitoring._log import Alarm
from tapax.reduce import Reducer

__all__ = ["Alarm", "Alert", "AlertWarning", "above", "below", "dead", "nonfinite"]


class AlertWarning(UserWarning):
    """What the warnings of alerts are."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """A statistic of the values or the gradients of some sites, and when it is too much."""

    kind: str
    selection: Selection
    stat: str
    reducer: Reducer
    limit: float = 0.0

    def wrong(self, number: float) -> str | None:
        """What is wrong with a number, as the end of a sentence on it."""
        raise NotImplementedError

    def alarm(self, step: int, label: str, number: Any) -> Alarm | None:
        """The alarm that the number of a site at a step is cause for."""
        number = float(number)
        wrong = self.wrong(number)
        if wrong is None:
            return None
        message = f"step {step}: {self._what(label)} {wrong}."
        return Alarm(step, label, f"{self.kind}_{self.stat}", number, message)

    def _what(self, label: str) -> str:
        return f"the {'gradient' if self.kind == 'grad' else 'value'} of {label} has"


class _Nonfinite(Limit):
    def wrong(self, number: float) -> str | None:
        if not number:
            return None
        return f"{number:.0f} number{' that is' if number == 1 else 's that are'} NaN or Inf"


class _Above(Limit):
    def wrong(self, number: float) -> str | None:
        if number <= self.limit:
            return None
        return f"{self.stat} {_against(number, 'above', self.limit)}"


class _Below(Limit):
    def wrong(self, number: float) -> str | None:
        if number >= self.limit:
            return None
        return f"{self.stat} {_against(number, 'below', self.limit)}"


class _Dead(Limit):
    def wrong(self, number: float) -> str | None:
        if number < self.limit:
            return None
        return f"{100 * number:.3g}% dead units, zero in the whole batch"


def _against(number: float, how: str, limit: float) -> str:
    if math.isnan(number):
        return f"nan, which cannot be told to be within the limit of {limit:g}"
    return f"{number:.4g}, {how} the limit of {limit:g}"


@dataclasses.dataclass(frozen=True)
class Alert:
    """What to warn of: some limits, any of which may be passed."""

    limits: tuple[Limit, ...]


def nonfinite(at: Selection = "**") -> Alert:
    """Values and gradients that have a NaN or an Inf in them."""
    at = check(at, "at")
    both = (("value", at), ("grad", _if_any(at)))
    return Alert(tuple(_Nonfinite(kind, x, "nonfinite", reduce.nonfinite) for kind, x in both))


def above(at: Selection, /, **limits: float) -> Alert:
    """Statistics above a limit: `above("**", grad_norm=1e3, value_rms=50.0)`.

    A keyword is `value_` or `grad_` and the name of a reducer, or `min` or `max`. A NaN is above
    any limit.
    """
    return Alert(tuple(_limits("above", _Above, at, limits)))


def below(at: Selection, /, **limits: float) -> Alert:
    """Statistics below a limit: `below("**/mlp", grad_rms=1e-12)`. A NaN is below any limit."""
    return Alert(tuple(_limits("below", _Below, at, limits)))


def dead(fraction: float = 0.9, at: Selection = "**") -> Alert:
    """Values of which at least this fraction of units, along the last axis, is zero everywhere."""
    number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not number or not 0 < fraction <= 1:
        raise ValueError(f"`fraction` must be a number above 0 and at most 1, but is {fraction!r}.")
    return Alert((_Dead("value", check(at, "at"), "dead", _DEAD, float(fraction)),))


def _if_any(at: Selection) -> Selection:
    """The same sites, none of which must have a gradient, as one that is named must."""
    return tuple(functools.partial(matches, p) if is_exact(p) else p for p in flatten(at))


def _alive(x: Any) -> Any:
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


def _limits(
    function: str, made: type[Limit], at: Selection, limits: dict[str, float]
) -> Iterator[Limit]:
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
        yield made(kind, at, stat, known[stat], float(limit))
