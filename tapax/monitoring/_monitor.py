"""`monitor`: a train step that reports statistics on every n-th call.

On a watched call the monitor runs a copy of the step for the statistics, then the step itself; or,
with `exact=False`, one program that is the step and computes the statistics. The thread of the
delivery fetches the statistics and passes them to the sinks.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from tapax import _jax, reduce
from tapax._calling.transform import check_function
from tapax._jax import Args, Kwargs, PyTree
from tapax._sites import SiteError, name_of
from tapax.monitoring._delivery import Delivery, warn
from tapax.monitoring._log import next_step
from tapax.monitoring._parameters import ParameterWatch
from tapax.monitoring._reader import NOTHING, Reader, check_integer, check_scalar
from tapax.monitoring._records import AlertEvent
from tapax.monitoring._watched_step import Captured, watched_step
from tapax.monitoring.alert import AlertRule
from tapax.monitoring.sink import To, make

P = ParamSpec("P")
R = TypeVar("R")

_NOTE = (
    "This was raised while tapax.monitor traced the step. A step that does more than compute "
    "with arrays, for example one that prints the loss as a float, cannot be traced. Monitor "
    "the jitted function that it calls."
)
NOT_CAPTURED: tuple[Any, Captured | None] = None, None
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
    exact: bool = True,
) -> Monitor[P, R]:
    """Make a train step that reports statistics of its sites on every n-th call.

    On the calls 0, `every`, 2 * `every`, ... the monitor first runs a copy of `step`, compiled
    once, which computes only the statistics. The copy changes nothing and donates no arguments.
    Then, as on every other call, the monitor runs `step` and returns its result. So the run is bit
    for bit the run without a monitor. Another thread fetches the numbers and passes them to the
    sinks.

    On these calls `jax.debug.print` and other callbacks in `step` run twice. Python side effects
    happen once more, when the monitor traces the copy. If `jax.distributed` runs several processes,
    all of them must call the monitored step.

    With `exact=False` a watched call runs one program instead of two: `step`, which then computes
    the statistics too. This takes half the time if `every` is 1. The result and the new state may
    differ from those of `step` in the last bit, because the compiler may combine operations in
    another way. Callbacks run once. Arguments that a jitted `step` donates are donated. If `step`
    is not jitted, watched calls treat it as `jax.jit` would: Python side effects happen only when
    the monitor traces it.

    Args:
        step: The train step, jitted or not.
        every: The number of calls from one record to the next.
        values: Selects sites and the statistics of their values, as in `tapax.capture`:
            `{"**/mlp": [tapax.reduce.rms, tapax.reduce.minmax]}`. A selection without a reducer
            records the root mean square; None records nothing. A function of a value in place of a
            reducer records what it returns, under its own name.
        grads: Selects sites and the statistics of their gradients, as `values` does.
        to: The destination of the records: a sink, a function of a step and a record, a path such
            as `"run.jsonl"`, `"table"`, `"page"`, or a list of these; see `tapax.sink`.
        params: Selects parameters: True for all, a selection of the paths of parameters or modules
            such as `"**/kernel"`, or a mapping from selections to reducers; None for none. A
            parameter is an array with respect to which `step` takes a gradient: an array among the
            arguments, or in a model of NNX, brainstate or Keras that `step` closes over. The
            parameter `Net/mlp/kernel` has the numbers `param_rms`, `param_grad_rms` and
            `update_ratio`, the root mean square of its change over that of the parameter. The
            module `Net/mlp` has these numbers for all parameters below it.
        alerts: The rules by which the monitor warns: one rule of `tapax.alert`, or a list of rules.
        modules: The modules whose results are sites, as in `tapax.capture`.
        start: The number of the first call, for a resumed run. By default it is 0, or the first
            multiple of `every` after the steps of a log in `to`, with a warning.
        every_process: If True, the sinks of every process receive the records, so each process
            needs a different path. If False, only the sinks of process 0 receive them.
        exact: If True, the result of a call always comes from `step` itself. If False, the result
            of a watched call comes from the program that computes the statistics.

    Returns:
        A `Monitor`, which is called like `step`. Close it at the end of the run.

    Raises:
        TypeError: If `step` is not a function, or another argument has a wrong type.
        ValueError: If `values`, `grads` and `params` are None and there are no alerts, if `every`
            or `start` is too small, or if the suffix of a path in `to` is unknown.
        OSError: If a path in `to` cannot be written.
        SiteError: At the first call of the monitor, if a selection names a site or a parameter that
            `step` does not have.
        RuntimeError: At a call of the monitor inside a function that JAX traces.

    Example:
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
    """
    check_function(step, "monitor", returns_function=False)
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
        exact=exact,
    )


class Monitor(Generic[P, R]):
    """A train step with a monitor; `tapax.monitor` makes it, and explains the arguments.

    Call it like the step. The end of a `with` block closes it. If the monitor fails during the run,
    it warns and stops watching, and the training goes on.

    Args:
        step: The train step.
        every: The number of calls from one record to the next.
        values: The statistics of values.
        grads: The statistics of gradients.
        to: The sinks.
        params: The parameters to record.
        alerts: The rules by which the monitor warns.
        modules: The modules whose results are sites.
        start: The number of the first call.
        every_process: True if the sinks of every process get the records.
        exact: False if a watched call returns the result of the program with the statistics.

    Attributes:
        step_number: The number of the next call. It may be set.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> step = jax.jit(lambda x: tapax.sow(x / 2, "h"))
        >>> rule = tapax.alert.below("h", value_rms=1e-3)
        >>> with tapax.monitor(step, every=2, to=tapax.Log(), alerts=rule) as watched:
        ...     x = watched(jnp.ones(3))
        >>> watched.step_number, watched.alerts
        (1, [])
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
        exact: bool = True,
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
        self._exact = exact
        self._watched = watched_step(step, plan, self._parameters, exact=exact)
        self._lock = threading.RLock()
        self._ran = False
        self._called: int | None = None
        self._is_closed = self._has_warned = False
        self._scalars: dict[str, Any] | None = None
        # Make the sinks last, so that a wrong argument leaves no sink open.
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
                f"The monitor of {name_of(self._step)} was called inside a function that JAX "
                "traces, by jax.jit, grad, vmap or scan, where it cannot count calls. Monitor the "
                "outermost function: tapax.monitor(jax.jit(step))."
            )
        with self._lock:  # so that every call has a number of its own
            self._delivery.release()
            number = self.step_number
            self._called, self._scalars = number, None
            is_watched = not number % self._every and not self._reader.off
            out, captured = self._capture(number, args, kwargs) if is_watched else NOT_CAPTURED
            self.step_number = number + 1
            if self._exact or captured is None:
                out = self._step(*args, **kwargs)
            if captured is not None:
                self._report(number, captured, out)
            return out

    def log(
        self, scalars: Mapping[str, Any] = NOTHING, /, *, always: bool = False, **named: Any
    ) -> None:
        """Add scalars, such as the loss, to the record of the last call.

        `log` does not wait for arrays: another thread fetches them when it delivers the record,
        after the next call of the step or `close`.

        Args:
            scalars: A mapping from names to scalars, for names that are not identifiers:
                `{"train/loss": loss}`.
            always: If True, a call without a record gets a record of these scalars alone. If False,
                `log` does nothing after such a call, and costs nothing.
            **named: Scalars by name: Python numbers, or arrays without axes.

        Raises:
            RuntimeError: If the step has not been called yet.
            TypeError: If a scalar is not a real number, is an array with axes, or is traced.

        Example:
            >>> import jax, jax.numpy as jnp, tapax
            >>> step, log = jax.jit(lambda x: tapax.sow(2 * x, "h")), tapax.Log()
            >>> with tapax.monitor(step, every=2, grads=None, to=log) as watched:
            ...     for i in range(4):
            ...         loss = watched(jnp.float32(i))
            ...         watched.log(loss=loss)
            >>> log["loss"].steps.tolist(), log["loss"].values.tolist()
            ([0, 2], [0.0, 4.0])
        """
        if self._called is None:
            raise RuntimeError(
                f"`log` adds to the step that was called last, but {name_of(self._step)} has not "
                "been called yet. Log after the call."
            )
        if self._is_closed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The monitor of {name_of(self._step)} is closed, so no record contains what you "
                "log now. Log before the end of its `with` block.",
                stacklevel=2,
            )
        if self._reader.off or (self._scalars is None and not always):
            return
        checked = {name: check_scalar(name, x) for name, x in {**scalars, **named}.items()}
        if self._scalars is None:
            self._scalars = {}
            read = functools.partial(self._reader.read, self._called, None, self._scalars)
            self._delivery.hold(read)
        self._scalars.update(checked)

    def _capture(self, number: int, args: Args, kwargs: Kwargs) -> tuple[Any, Captured | None]:
        """Run the captured step; without statistics if it fails before it has changed anything."""
        try:
            if self._parameters is not None:
                self._parameters.open(args, kwargs)
            out, captured = self._watched((), args, kwargs)
            if self._exact and self._parameters is not None:
                self._parameters.hold(captured.parameters)
        except Exception as error:
            # Raise at once if the step cannot be traced; later failures must not stop the training.
            if not self._ran and not isinstance(error, jax.errors.JaxRuntimeError):
                if not isinstance(error, SiteError):
                    error.add_note(_NOTE)
                raise
            if not self._exact and any(map(_is_deleted, self._watched.arrays(args, kwargs))):
                raise  # the failed program has taken the arguments that the step needs
            self._fail(number, error)
            return NOT_CAPTURED
        if not self._ran and self._parameters is None and not captured.statistics.packed:
            warnings.warn(
                f"The monitor of {name_of(self._step)} records nothing: {self._reader.absence}",
                stacklevel=3,
            )
        self._ran = True
        return out, captured

    def _report(self, number: int, captured: Captured, out: Any) -> None:
        """Prepare the record of a step; it is delivered when `log` can no longer add to it."""
        self._scalars = {}
        statistics, parameters = captured
        try:
            if self._exact and self._parameters is not None and parameters is not None:
                parameters = self._parameters.measure(parameters, out)
            statistics, parameters = _jax.gather((statistics, parameters))
        except Exception as error:
            self._fail(number, error)
            return
        read = functools.partial(self._reader.read, number, statistics.fetch, self._scalars)
        if self._parameters is not None:
            self._parameters.close()
            read = functools.partial(read, functools.partial(self._parameters.read, parameters))
        self._delivery.hold(read)

    def _fail(self, number: int, error: Exception) -> None:
        self._reader.stop()
        if self._parameters is not None:
            self._parameters.close()
        warn(
            f"The monitor of {name_of(self._step)} is off, and the training goes on: the "
            f"watched step {number} failed with {type(error).__name__}: {error}"
        )

    @property
    def alerts(self) -> list[AlertEvent]:
        """The alerts that went off so far; after `close`, all alerts of the run."""
        return list(self._reader.alerts)

    def close(self) -> None:
        """Wait until all records are delivered, and close the sinks.

        The step can still be called, but is no longer watched.

        Example:
            >>> import tapax
            >>> watched = tapax.monitor(lambda x: tapax.sow(x, "h"))
            >>> watched.close()
        """
        self._is_closed = True
        self._reader.stop()
        self._delivery.close()

    def __enter__(self) -> Monitor[P, R]:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.is_deleted()
