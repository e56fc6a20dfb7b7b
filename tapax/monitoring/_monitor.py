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

import functools
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from tapax import _jax, reduce
from tapax._calling.transform import TransformedFunction, check_function
from tapax._jax import Args, Kwargs, PyTree
from tapax._sites import SiteError, name_of
from tapax.monitoring._delivery import Delivery, warn
from tapax.monitoring._log import next_step
from tapax.monitoring._parameters import ParameterWatch
from tapax.monitoring._reader import NOTHING, Reader, check_integer, check_scalar
from tapax.monitoring._records import AlertEvent
from tapax.monitoring._watched_step import Captured, make_transform
from tapax.monitoring.alert import AlertRule
from tapax.monitoring.sink import To, make

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
    grads: PyTree = EVERYTHING,
    to: To = None,
    *,
    params: Any = None,
    alerts: AlertRule | Sequence[AlertRule] = (),
    modules: Any = True,
    start: int | None = None,
    every_process: bool = False,
) -> Monitor[P, R]:
    """The train step `step`, watched on every n-th call.

    `values` and `grads` select the sites, and say which statistics to take of them, as in
    `tapax.capture`: `{"**/mlp": [tapax.reduce.rms, tapax.reduce.minmax]}`. A selection without a
    reducer stands for the root mean square.

    `params` adds weights, their gradients, and how much the step changes them: True for all
    parameters, a selection of their paths or of modules, such as `"**/kernel"`, or a mapping from
    these to reducers. A parameter is an array by which the step takes a gradient, among the
    arguments or in a model of NNX, brainstate or Keras that the step closes over; `Net/mlp/kernel`
    has the numbers `param_rms`, `param_grad_rms` and `update_ratio`, the root mean square of the
    change over that of the parameter; so has the module `Net/mlp`, of all parameters below it.

    `to` says where the numbers go: a sink, a function of a step and a record, a path, or a list of
    these: see `tapax.sink`. `alerts` are rules by which to warn: see `tapax.alert`.

    `start` is the number of the first call: give it where a run is resumed. By default it is 0, or,
    if `to` has a log with records already, the first multiple of `every` after their steps, with a
    warning.

    Where `jax.distributed` runs several processes, all of them call the monitored step, and the
    sinks of process 0 alone get the records. With `every_process` those of every process do: give
    each process a path of its own.
    """
    check_function(step, "monitor")
    return Monitor(
        step,
        check_integer("every", every, 1),
        values,
        grads,
        to,
        params=params,
        alerts=alerts,
        modules=modules,
        start=None if start is None else check_integer("start", start, 0),
        every_process=every_process,
    )


class Monitor(Generic[P, R]):
    """A step that is watched: see `monitor`.

    `step_number` is the number of its next call, and may be set. `log` adds scalars to the record
    of the last call. `alerts` are those that went off so far. `close`, or the end of a `with`
    block, waits for reports to be delivered, and closes the sinks; the step can be called on,
    without being watched.
    """

    def __init__(
        self,
        step: Callable[P, R],
        every: int,
        values: Any,
        grads: PyTree,
        to: Any,
        *,
        params: Any,
        alerts: AlertRule | Sequence[AlertRule],
        modules: Any,
        start: int | None,
        every_process: bool,
    ):
        functools.update_wrapper(self, step, updated=())
        self._reader = Reader(values, grads, alerts)
        self._parameters = (
            None if params is None or params is False else ParameterWatch(step, params)
        )
        if not self._reader.requests and self._parameters is None:
            raise ValueError(
                "There is nothing to monitor: `values`, `grads` and `params` are None, and no "
                "alert is given."
            )
        plan = self._reader.make_plan(modules)
        self._step = step
        self._every = every
        self._copy = TransformedFunction(step, make_transform(plan, self._parameters))
        self._ran = False
        self._called: int | None = None
        self._scalars: dict[str, Any] | None = None
        # Last, so that nothing is left open if an argument is wrong.
        sinks = make(to)
        self.step_number = next_step(sinks, every) if start is None else start
        self._delivery = Delivery(sinks, self._reader.stop, every_process)
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
        self._delivery.release()
        number = self.step_number
        self._called, self._scalars = number, None
        finish = None
        if not number % self._every and not self._reader.off:
            finish = self._watch(number, args, kwargs)
        self.step_number = number + 1
        out = self._step(*args, **kwargs)
        if finish is not None:
            finish(out)
        return out

    def log(
        self, scalars: Mapping[str, Any] = NOTHING, /, *, always: bool = False, **named: Any
    ) -> None:
        """Adds scalars to the record of the step that was called last: `step.log(loss=loss)`.

        They are Python numbers or arrays without axes, by name; names that are not identifiers go
        in a mapping: `step.log({"train/loss": loss})`. Nothing waits for them: another thread
        fetches arrays when it delivers the record, after the next call of the step, or `close`.

        If the step was not watched, nothing is logged, and it costs nothing; with `always` the step
        gets a record of these scalars alone.

        Raises `RuntimeError` before the first call, `TypeError` for what is not a number.
        """
        if self._called is None:
            raise RuntimeError(
                f"`log` adds to the step that was called last, but {name_of(self._step)} has not "
                "been called yet. Log after the call."
            )
        if self._reader.off or (self._scalars is None and not always):
            return
        checked = {name: check_scalar(name, x) for name, x in {**scalars, **named}.items()}
        if self._scalars is None:
            self._scalars = {}
            read = functools.partial(self._reader.read, self._called, None, self._scalars)
            self._delivery.hold(read)
        self._scalars.update(checked)

    def _watch(self, number: int, args: Args, kwargs: Kwargs) -> Callable[[Any], None] | None:
        """Runs the copy of the step; what to do with the result of the step, if it is not off."""
        try:
            if self._parameters is not None:
                self._parameters.open(args, kwargs)
            captured: Captured = _jax.gather(self._copy((), args, kwargs))
            if self._parameters is not None and captured.parameters is not None:
                self._parameters.hold(captured.parameters)
        except Exception as error:
            # What cannot be traced is told at once; what fails later must not stop the training.
            if not self._ran and not isinstance(error, jax.errors.JaxRuntimeError):
                if not isinstance(error, SiteError):
                    error.add_note(_NOTE)
                raise
            self._fail(number, error)
            return None
        if not self._ran and self._parameters is None and not captured.statistics.packed:
            warnings.warn(
                f"The monitor of {name_of(self._step)} sees nothing: the step has no sites. Mark "
                "values with tapax.sow(value, name), or pass modules of a framework to the step.",
                stacklevel=3,
            )
        self._ran = True
        return functools.partial(self._report, number, captured)

    def _report(self, number: int, captured: Captured, out: Any) -> None:
        """Has the record of a step delivered, once it is known what else is logged."""
        self._scalars = {}
        fetch = captured.statistics.fetch
        read = functools.partial(self._reader.read, number, fetch, self._scalars)
        if self._parameters is not None and captured.parameters is not None:
            try:
                found = self._parameters.measure(captured.parameters, out)
            except Exception as error:
                self._fail(number, error)
                return
            read = functools.partial(read, functools.partial(self._parameters.read, found))
        self._delivery.hold(read)

    def _fail(self, number: int, error: Exception) -> None:
        self._reader.stop()
        warn(
            f"The monitor of {name_of(self._step)} is off, and the training goes on: the "
            f"watched step {number} failed with {type(error).__name__}: {error}"
        )

    @property
    def alerts(self) -> list[AlertEvent]:
        """The alerts that went off so far; all of them, once the monitor is closed."""
        return list(self._reader.alerts)

    def close(self) -> None:
        """Waits until everything is delivered, and closes the sinks."""
        self._reader.stop()
        self._delivery.close()

    def __enter__(self) -> Monitor[P, R]:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
