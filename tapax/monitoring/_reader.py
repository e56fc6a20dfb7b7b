"""`Reader`: the conversion of captures, from watched steps or streamed iterations, to reports.

A reader keeps the state that all records of a run share: the requested statistics, the limits of
the alerts, and the alerts that have gone off.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tapax._results import SiteTable, Taps
from tapax._results.site_table import lazy_flow_of
from tapax._sites import wrong_type
from tapax._walk.plan import Plan
from tapax.monitoring._delivery import Report, warn
from tapax.monitoring._readings import (
    Reading,
    ResultLabels,
    StatisticRequest,
    label_results,
    make_requests,
    read_numbers,
)
from tapax.monitoring._records import AlertEvent, Number
from tapax.monitoring.alert import AlertRule, AlertWarning

NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Reader:
    """A converter of captures to reports, which works on the thread of the delivery.

    `values`, `grads` and `alerts` are the arguments of the monitor. The reader has no reference to
    the monitor, which may no longer exist when the last capture arrives.
    """

    def __init__(self, values: Any, grads: Any, alerts: Any):
        rules = _list_rules(alerts)
        pairs = [(rule, limit) for rule, alert in enumerate(rules) for limit in alert.limits]
        self._limits = {f"{x.kind}#a{i}": (rule, x) for i, (rule, x) in enumerate(pairs)}
        self.requests = [*make_requests("value", values), *make_requests("grad", grads)]
        self.requests += [
            StatisticRequest(x.kind, x.selection, x.reducer, x.reducer.name, key)
            for key, (_, x) in self._limits.items()
        ]
        self.off = False
        self.alerts: list[AlertEvent] = []
        self._labels: dict[SiteTable, list[ResultLabels]] = {}
        self._last: tuple[SiteTable | None, list[ResultLabels]] = None, []
        self._beyond: set[tuple[str, str]] = set()
        self._warned: set[tuple[int, str]] = set()

    def make_plan(self, modules: Any) -> Plan:
        """Make the plan that captures every requested statistic."""
        values, grads = (
            [request.mapping for request in self.requests if request.kind == kind]
            for kind in ("value", "grad")
        )
        return Plan.make(values, grads, modules=modules, reducing=True)

    @property
    def absence(self) -> str:
        """The likely reason why a step has none of the requested statistics, as a sentence."""
        if all(request.kind == "grad" for request in self.requests):
            return (
                "no gradient reaches a site, and `values` is None. Monitor a step that takes the "
                "gradient itself."
            )
        return (
            "the step has no sites. Mark values with tapax.sow(value, name), or pass modules of a "
            "framework to the step."
        )

    def stop(self) -> None:
        self.off = True

    def read(
        self,
        step: int,
        fetch: Callable[[], Taps] | None,
        scalars: Mapping[str, Any] = NOTHING,
        read_parameters: Callable[[], Mapping[str, Number]] = dict,
    ) -> Report:
        """Read the record of a step: its statistics, and the scalars that the user logged.

        `fetch` returns the statistics as NumPy arrays; it is None if the record has no statistics.
        """
        taps = None if fetch is None else fetch()
        record, alerts = ({}, []) if taps is None else self._read_taps(step, taps)
        flow = None if taps is None else lazy_flow_of(taps.sites)
        numbers = {name: float(x) for name, x in jax.device_get(dict(scalars)).items()}
        return Report(step, {**record, **read_parameters(), **numbers}, alerts, flow)

    def _read_taps(self, step: int, taps: Taps) -> tuple[dict[str, Number], list[AlertEvent]]:
        arrays = {**taps.values, **taps.grads}
        readings = list(read_numbers(self._label(taps.sites), arrays, taps.valid))
        record = {r.name: r.number for r in readings if r.request.key not in self._limits}
        alerts = self._check(step, [r for r in readings if r.request.key in self._limits])
        return record, alerts

    def _label(self, sites: SiteTable) -> list[ResultLabels]:
        """Return the labels of the results at `sites`, with two caches: hashing `sites` is slow."""
        if self._last[0] is not sites:
            labels = self._labels.get(sites)
            if labels is None:
                labels = self._labels[sites] = label_results(self.requests, sites)
            self._last = sites, labels
        return self._last[1]

    def _check(self, step: int, readings: Sequence[Reading]) -> list[AlertEvent]:
        """Find the alerts that go off at a step: the numbers were within their limits before."""
        begun: list[tuple[int, AlertEvent]] = []
        for reading in readings:
            rule, limit = self._limits[reading.request.key]
            if reading.stat != limit.stat:
                continue
            which = reading.request.key, reading.label
            event = limit.check(step, reading.label, reading.number)
            if event is None:
                self._beyond.discard(which)
            elif which not in self._beyond:
                self._beyond.add(which)
                begun.append((rule, event))
        found = [event for _, event in begun]
        self.alerts += found
        self._warn(begun)
        return found

    def _warn(self, begun: list[tuple[int, AlertEvent]]) -> None:
        """Warn once for each rule and layer; one warning names all layers of a rule at a step."""
        new: dict[int, list[AlertEvent]] = {}
        for rule, event in begun:
            if (rule, event.site) not in self._warned:
                self._warned.add((rule, event.site))
                new.setdefault(rule, []).append(event)
        for first, *others in new.values():
            more = ""
            if others:
                names = ", ".join(event.site for event in others[:5])
                rest = f" and {len(others) - 5} more" if len(others) > 5 else ""
                more = f" The same holds for {names}{rest}."
            warn(first.message + more, AlertWarning)


def check_integer(name: str, given: Any, least: int) -> int:
    """Check an argument that counts steps, and convert it to an integer."""
    try:
        number = operator.index(given)
    except TypeError:
        number = None
    if number is None or isinstance(given, bool):
        raise wrong_type(f"`{name}` must be a number of steps, but is", given)
    if number < least:
        raise ValueError(f"`{name}` must be at least {least}, but is {number}.")
    return number


def check_scalar(name: str, given: Any) -> Any:
    """Check a scalar that the user logs; copy an array, because the next step may donate it."""
    if isinstance(given, Tracer):
        raise TypeError(
            f"`log` was given the traced value {name!r}, inside a function that JAX is tracing. "
            "Return it from the step, and log it after the call."
        )
    is_array = isinstance(given, (jax.Array, np.ndarray, np.generic))
    kind = given.dtype if is_array else np.result_type(type(given)) if _is_number(given) else None
    if kind is None or not (jnp.issubdtype(kind, jnp.floating) or kind.kind in "biu"):
        raise wrong_type(f"`log` takes real numbers, but {name!r} is", given)
    if is_array and given.shape:
        raise TypeError(
            f"`log` takes scalars, but {name!r} is an array of shape {list(given.shape)}. Log its "
            "mean, or mark it with tapax.sow(value, name) to have statistics of it."
        )
    return jnp.copy(given) if isinstance(given, jax.Array) else given


def _is_number(given: Any) -> bool:
    return isinstance(given, (bool, int, float))


def _list_rules(alerts: Any) -> list[AlertRule]:
    several = [alerts] if isinstance(alerts, AlertRule) else alerts
    if isinstance(several, (list, tuple)) and all(isinstance(a, AlertRule) for a in several):
        return list(several)
    raise wrong_type(
        "`alerts` must be alerts of tapax.alert, such as tapax.alert.nonfinite(), but is", alerts
    )
