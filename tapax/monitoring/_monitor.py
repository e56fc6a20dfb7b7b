"""`monitor`: a train step that is watched now and then.

>>> import jax, jax.numpy as jnp, tapax
>>> @jax.jit
... def step(w, x):
...     loss = lambda w: jnp.sum(tapax.sow(jnp.tanh(x @ w), "h") ** 2)
...     return w - 0.1 * jax.grad(loss)(w)
>>> log, w = tapax.Log(), jnp.ones((3, 2))
>>> with tapax.monitor(step, every=100, to=log) as watched:
...     for _ in range(300):
...         w = watched(w, jnp.ones(3))
>>> log.steps.tolist(), log.names
([0, 100, 200], ['h/value_rms', 'h/grad_rms'])

On the calls 0, `every`, 2 * `every`, ... the step is run twice: first a copy of it, compiled once,
of which the statistics are all that is computed; it changes nothing and keeps its arguments. Then,
as on every other call, the step itself, whose result is returned. So the run is the one without a
monitor, bit for bit. The numbers are fetched, and handed on, by another thread.

Sharp edges: what a step does besides computing is done twice on those calls, `jax.debug.print` and
callbacks; Python side effects once more, when the copy is traced.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from tapax import _jax, reduce
from tapax._calling.program import Program
from tapax._calling.transform import Transform, TransformedFunction, check_function
from tapax._results.site_table import SiteTable
from tapax._results.taps import Taps
from tapax._sites.errors import SiteError, name_of
from tapax._walk.plan import Plan
from tapax.monitoring import sink as sinks
from tapax.monitoring._delivery import Delivery, Found, warn
from tapax.monitoring._log import Alarm
from tapax.monitoring._numbers import Asked, Slot, ask, layout, numbered, read
from tapax.monitoring.alert import Alert, AlertWarning, Limit

P = ParamSpec("P")
R = TypeVar("R")

_NOTE = (
    "This was raised while tapax.monitor traced the step. A step that does more than compute with "
    "arrays, such as to print the loss as a float, cannot be traced: monitor the jitted function "
    "that it calls."
)
EVERYTHING: Mapping[Any, Any] = types.MappingProxyType({"**": reduce.rms})


def monitor(
    step: Callable[P, R],
    every: int = 100,
    values: Any = EVERYTHING,
    grads: Any = EVERYTHING,
    to: sinks.To = None,
    alerts: Alert | Sequence[Alert] = (),
    modules: Any = True,
) -> Monitor[P, R]:
    """The train step `step`, watched on every n-th call.

    `values` and `grads` select the sites, and say which statistics to take of them, as in
    `tapax.capture`: `{"**/mlp": [tapax.reduce.rms, tapax.reduce.minmax]}`. A selection without a
    reducer stands for the root mean square.

    `to` says where the numbers go: a sink, a function of a step and a record, a path, or a list of
    these: see `tapax.sink`. `alerts` are what to warn of: see `tapax.alert`.
    """
    check_function(step, "monitor")
    return Monitor(step, _every(every), values, grads, to, _alerts(alerts), modules)


class Monitor(Generic[P, R]):
    """A step that is watched: see `monitor`.

    `step_number` is the number of its next call, and may be set, when a run is continued. `alarms`
    are those raised so far. `close`, or the end of a `with` block, waits for what was found to be
    delivered, and closes the sinks; the step can be called on, without being watched.
    """

    def __init__(
        self,
        step: Callable[P, R],
        every: int,
        values: Any,
        grads: Any,
        to: Any,
        alerts: Sequence[Alert],
        modules: Any,
    ):
        functools.update_wrapper(self, step, updated=())
        limits = [(i, limit) for i, alert in enumerate(alerts) for limit in alert.limits]
        asked = [
            one
            for kind, selection in (("value", values), ("grad", grads))
            for one in numbered(kind, list(ask(kind, selection, reduce.rms)))
        ]
        watched = [
            (Asked(x.kind, x.selection, x.reducer, x.reducer.name, f"{x.kind}#a{i}"), (alert, x))
            for i, (alert, x) in enumerate(limits)
        ]
        if not asked and not watched:
            raise ValueError(
                "There is nothing to monitor: `values` and `grads` are None, and no alert is given."
            )
        plan = Plan.make(
            *(
                [a.mapping for a in (*asked, *(a for a, _ in watched)) if a.kind == kind]
                for kind in ("value", "grad")
            ),
            modules=modules,
            reducing=True,
        )
        self.step_number = 0
        self._step = step
        self._every = every
        self._copy = TransformedFunction(step, _Watching(plan))
        self._ran = False
        self._reader = _Reader(asked, watched)
        # Last, so that nothing is left open if an argument is wrong.
        self._delivery = Delivery(sinks.make(to), self._reader.stop)
        weakref.finalize(self, self._delivery.end).atexit = False

    def __repr__(self) -> str:
        return f"monitor({name_of(self._step)})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not _jax.trace_state_clean():
            raise RuntimeError(
                f"The monitor of {name_of(self._step)} was called while a function is traced, by "
                "jax.jit, grad, vmap or scan, where no call can be told from the next. Monitor the "
                "outermost function: tapax.monitor(jax.jit(step))."
            )
        number = self.step_number
        if not number % self._every and not self._reader.off:
            self._watch(number, args, kwargs)
        self.step_number = number + 1
        return self._step(*args, **kwargs)

    def _watch(self, number: int, args: Any, kwargs: Any) -> None:
        try:
            taps = self._copy((), args, kwargs)
        except Exception as error:
            # What cannot be traced is told at once; what fails later must not stop the training.
            if not self._ran and not isinstance(error, jax.errors.JaxRuntimeError):
                if not isinstance(error, SiteError):
                    error.add_note(_NOTE)
                raise
            self._reader.stop()
            warn(
                f"The monitor of {name_of(self._step)} is off, and the training goes on: the "
                f"watched step {number} failed with {type(error).__name__}: {error}"
            )
            return
        if not self._ran and not taps.values and not taps.grads:
            warnings.warn(
                f"The monitor of {name_of(self._step)} sees nothing: the step has no sites. Mark "
                "values with tapax.sow(value, name), or pass modules of a framework to the step.",
                stacklevel=3,
            )
        self._ran = True
        self._delivery.put(functools.partial(self._reader.read, number, taps))

    @property
    def alarms(self) -> list[Alarm]:
        """What the alerts have found so far; all of it, once the monitor is closed."""
        return list(self._reader.alarms)

    def close(self) -> None:
        """Waits until everything is delivered, and closes the sinks."""
        self._reader.stop()
        self._delivery.close()

    def __enter__(self) -> Monitor[P, R]:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class _Watching(Transform):
    """Returns what the plan selects, and computes nothing else."""

    plan: Plan
    stateless = True

    def prepare(self, program: Program, operands: Any, arrays: Sequence[Any]) -> Any:
        effects = {str(effect) for effect in program.jaxpr.effects}
        if effects & {"IO", "OrderedIO"}:
            warnings.warn(
                "The monitored step has an io_callback, which is called a second time on each call "
                "that is watched. If it reads data, or counts, the run is not the one without a "
                "monitor: take it out of the step.",
                stacklevel=10,
            )

    def run(
        self, program: Program, prepared: Any, operands: Any, arrays: Sequence[Any], checked: bool
    ) -> Any:
        return None, program.only(lambda out: ()).walk(self.plan, arrays)[1]

    def finish(self, out: Any, extra: Any) -> Any:
        return extra


class _Reader:
    """Makes numbers of what was captured, on the thread of the delivery.

    It does not know the monitor, which may be gone when the last numbers come.
    """

    def __init__(self, asked: list[Asked], watched: list[tuple[Asked, tuple[int, Limit]]]):
        self.off = False
        self.alarms: list[Alarm] = []
        self._asked = asked
        self._watched = {a.key: of for a, of in watched}
        self._all = [*asked, *(a for a, _ in watched)]
        self._slots: dict[SiteTable, list[Slot]] = {}
        self._lasting: set[tuple[str, str]] = set()
        self._warned: set[tuple[int, str]] = set()

    def stop(self) -> None:
        self.off = True

    def read(self, step: int, taps: Taps) -> Found:
        values, grads, valid = jax.device_get((taps.values, taps.grads, taps.valid))
        slots = self._slots.get(taps.sites)
        if slots is None:
            slots = self._slots[taps.sites] = layout(self._all, taps.sites)
        readings = list(read(slots, {**values, **grads}, valid))
        record = {r.name: r.number for r in readings if r.asked.key not in self._watched}
        alarms = self._look(step, [r for r in readings if r.asked.key in self._watched])
        return step, record, alarms

    def _look(self, step: int, readings: Any) -> list[Alarm]:
        """The alarms of a step: those of what has begun."""
        begun: list[tuple[int, Alarm]] = []
        lasting: set[tuple[str, str]] = set()
        for reading in readings:
            alert, limit = self._watched[reading.asked.key]
            if reading.stat != limit.stat:
                continue
            alarm = limit.alarm(step, reading.label, reading.number)
            if alarm is None:
                continue
            lasting.add((reading.asked.key, reading.label))
            if (reading.asked.key, reading.label) not in self._lasting:
                begun.append((alert, alarm))
        self._lasting = lasting
        found = [alarm for _, alarm in begun]
        self.alarms += found
        self._warn(begun)
        return found

    def _warn(self, begun: list[tuple[int, Alarm]]) -> None:
        """Warns once for each alert and layer; of all that an alert found in a step, at once."""
        new: dict[int, list[Alarm]] = {}
        for alert, alarm in begun:
            if (alert, alarm.site) not in self._warned:
                self._warned.add((alert, alarm.site))
                new.setdefault(alert, []).append(alarm)
        for first, *others in new.values():
            more = ""
            if others:
                names = ", ".join(alarm.site for alarm in others[:5])
                rest = f" and {len(others) - 5} more" if len(others) > 5 else ""
                more = f" So it is with {names}{rest}."
            warn(first.message + more, AlertWarning)


def _every(every: Any) -> int:
    try:
        number = operator.index(every)
    except TypeError:
        number = None
    if number is None or isinstance(every, bool):
        raise TypeError(
            f"`every` must be a number of steps, but is {every!r} of type {type(every).__name__}."
        )
    if number < 1:
        raise ValueError(f"`every` must be at least 1, to watch every step, but is {number}.")
    return number


def _alerts(alerts: Any) -> list[Alert]:
    several = [alerts] if isinstance(alerts, Alert) else alerts
    if isinstance(several, (list, tuple)) and all(isinstance(a, Alert) for a in several):
        return list(several)
    raise TypeError(
        f"`alerts` must be alerts of tapax.alert, such as tapax.alert.nonfinite(), but is "
        f"{alerts!r} of type {type(alerts).__name__}."
    )
