"""`stream`: a function whose outermost loop sends statistics to sinks while it runs.

`_streamed_loops` explains how the stream transforms the loop, and the cost.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from tapax import _jax
from tapax._calling.program import TracedCall
from tapax._calling.transform import Transform, TransformedFunction, check_function
from tapax._jax import PyTree
from tapax._marks.context import active_policy
from tapax._results import Taps
from tapax._sites import SiteError, flatten, is_exact, matches, name_of
from tapax._walk.plan import Plan
from tapax._walk.walk import Walk
from tapax.monitoring._delivery import Delivery, Report
from tapax.monitoring._emission import Receiver
from tapax.monitoring._log import next_step
from tapax.monitoring._monitor import EVERYTHING
from tapax.monitoring._reader import Reader, check_integer
from tapax.monitoring._records import AlertEvent
from tapax.monitoring._streamed_loops import StreamHooks
from tapax.monitoring.alert import AlertRule
from tapax.monitoring.sink import To, make

P = ParamSpec("P")
R = TypeVar("R")

_PATIENCE = 30.0
"""The number of seconds that the end of a loop waits for slow sinks."""


def stream(
    fn: Callable[P, R],
    values: Any = EVERYTHING,
    grads: PyTree = EVERYTHING,
    every: int = 100,
    to: To = None,
    *,
    alerts: AlertRule | Sequence[AlertRule] = (),
    modules: Any = True,
    start: int | None = None,
) -> Stream[P, R]:
    """Make a function like `fn` whose outermost loop sends statistics to sinks while it runs.

    Each of the iterations 0, `every`, 2 * `every`, ... of a `lax.scan`, `fori_loop` or `while_loop`
    makes a record. The stream does not change the results. A site in a loop inside the streamed
    loop has a number for each iteration of the inner loop; `tapax.reduce.rms.total` merges these
    numbers. As in a capture, statistics merge the devices and the examples of a `vmap` inside or
    around the stream.

    A call returns when the loop has ended and its records are delivered. If the call is inside
    `jax.jit` or `jax.vmap`, the records are complete when the results are. The stream drops a sink
    that raises, with a warning.

    Args:
        fn: The function with the loop, jitted or not.
        values: Selects sites inside the loop and the statistics of their values, as in
            `tapax.monitor`. A selection without a reducer records the root mean square; None
            records nothing.
        grads: Selects sites inside the loop and the statistics of their gradients, as `values`
            does.
        every: The number of iterations from one record to the next.
        to: The destination of the records, as in `tapax.monitor`; see `tapax.sink`.
        alerts: The rules by which the stream warns: one rule of `tapax.alert`, or a list of rules.
        modules: The modules whose results are sites, as in `tapax.capture`.
        start: The number of the first iteration. By default it is 0, or the first multiple of
            `every` after the steps of a log in `to`, with a warning. The next call continues with
            the next number; inside another jitted function every call begins at `start`.

    Returns:
        A `Stream`, which is called like `fn`. Close it at the end of the run.

    Raises:
        TypeError: If `fn` is not a function, or another argument has a wrong type.
        ValueError: If `values` and `grads` are None and there are no alerts, if `every` or `start`
            is too small, or if the suffix of a path in `to` is unknown.
        OSError: If a path in `to` cannot be written.
        SiteError: When the stream is called, if `fn` has no loop, if no selected site is in a loop,
            or if a selection names a site that is outside of all loops.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> @jax.jit
        ... def train(w, xs):
        ...     def step(w, x):
        ...         loss = lambda w: jnp.sum(tapax.sow(jnp.tanh(x @ w), "h") ** 2)
        ...         value, grad = jax.value_and_grad(loss)(w)
        ...         return w - 0.1 * grad, value
        ...
        ...     return jax.lax.scan(step, w, xs)
        >>> log = tapax.Log()
        >>> with tapax.stream(train, every=100, to=log) as streamed:
        ...     w, losses = streamed(jnp.ones((3, 2)), jnp.ones((300, 3)))
        >>> log.steps.tolist(), log.names
        ([0, 100, 200], ['h/value_rms', 'h/grad_rms'])
    """
    check_function(fn, "stream")
    return Stream(
        fn,
        values,
        grads,
        check_integer("every", every, 1),
        to,
        alerts=alerts,
        modules=modules,
        start=None if start is None else check_integer("start", start, 0),
    )


class Stream(Generic[P, R]):
    """A function whose outermost loop is streamed; `tapax.stream` makes it.

    Call it like the function. The end of a `with` block closes it. `tapax.stream` explains the
    arguments.

    Args:
        fn: The function with the loop.
        values: The statistics of values.
        grads: The statistics of gradients.
        every: The number of iterations from one record to the next.
        to: The sinks.
        alerts: The rules by which the stream warns.
        modules: The modules whose results are sites.
        start: The number of the first iteration.

    Example:
        >>> import jax, tapax
        >>> def double(x):
        ...     return jax.lax.fori_loop(0, 10, lambda i, x: tapax.sow(2 * x, "h"), x)
        >>> log = tapax.Log()
        >>> with tapax.stream(double, grads=None, every=5, to=log) as streamed:
        ...     x = streamed(1.0)
        >>> float(x), log["h/value_rms"].values.tolist()
        (1024.0, [2.0, 64.0])
        >>> streamed.step_number, streamed.alerts
        (10, [])
    """

    def __init__(
        self,
        fn: Callable[P, R],
        values: Any,
        grads: PyTree,
        every: int,
        to: Any,
        *,
        alerts: AlertRule | Sequence[AlertRule],
        modules: Any,
        start: int | None,
    ):
        functools.update_wrapper(self, fn, updated=())
        self._reader = Reader(values, grads, alerts)
        if not self._reader.requests:
            raise ValueError(
                "There is nothing to stream: `values` and `grads` are None, and no alert is given."
            )
        plan = self._reader.make_plan(modules)
        self._fn = fn
        # Make the sinks last, so that a wrong argument leaves no sink open.
        sinks = make(to)
        first = next_step(sinks, every) if start is None else start
        self._delivery = Delivery(sinks, self._reader.stop)
        self._channel = _Channel(self._reader, self._delivery, every, first)
        self._call = TransformedFunction(fn, _StreamTransform(plan, every, self._channel))
        # The channel, because a program traced with the stream refers to it and may outlive `self`.
        weakref.finalize(self._channel, self._delivery.end).atexit = False

    def __repr__(self) -> str:
        return f"stream({name_of(self._fn)})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not _jax.trace_state_clean():
            return self._call((), args, kwargs)
        self._channel.begin()
        out = jax.block_until_ready(self._call((), args, kwargs))
        jax.effects_barrier()
        self._delivery.wait(_PATIENCE)
        self.step_number += self._channel.longest
        return out

    @property
    def step_number(self) -> int:
        """The number of the first iteration of the next call. It may be set."""
        return self._channel.first

    @step_number.setter
    def step_number(self, number: int) -> None:
        self._channel.first = check_integer("step_number", number, 0)

    @property
    def alerts(self) -> list[AlertEvent]:
        """The alerts that went off so far; after `close`, all alerts of the run."""
        return list(self._reader.alerts)

    def close(self) -> None:
        """Wait until all records are delivered, and close the sinks.

        Example:
            >>> import tapax
            >>> streamed = tapax.stream(lambda x: x)
            >>> streamed.close()
        """
        jax.effects_barrier()
        self._reader.stop()
        self._delivery.close()

    def __enter__(self) -> Stream[P, R]:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


class _Channel:
    """A channel to the delivery from the loops, which emit on threads of JAX.

    `first` is the number of the first iteration of each loop, and `longest` the number of
    iterations of the longest loop.
    """

    def __init__(self, reader: Reader, delivery: Delivery, every: int, first: int):
        self.first, self.longest = first, 0
        self._reader, self._delivery, self._every = reader, delivery, every
        self._lock = threading.Lock()
        self._calls = 0

    def begin(self) -> None:
        """Begin a call of the stream, whose records are not those of a call that failed before."""
        self._calls += 1
        self.longest = 0

    def receiver(self, *, length: int | None, reverse: bool) -> Receiver:
        """Make the receiver of a loop. `length` is None if it is unknown.

        The receiver of a reverse loop keeps the records until all of them have arrived.
        """
        kept: dict[int, Callable[[], Taps]] = {}
        calls = self._calls
        count = None if length is None else -(-length // self._every)
        last = None if count is None else (count - 1) * self._every

        def receive(number: int, unpack: Callable[[], Taps] | None) -> None:
            nonlocal calls
            with self._lock:
                if calls != self._calls or self.first + number in kept:
                    # A call that failed has left records of a reverse loop.
                    calls = self._calls
                    kept.clear()
                if unpack is not None:
                    kept[self.first + number] = unpack
                if reverse:
                    # The order of arrival tells nothing: XLA may call the host for the iterations
                    # that run first after all others, because no result depends on the call.
                    is_over = len(kept) == count
                else:
                    is_over = unpack is None if length is None else number == last
                if is_over or not reverse:
                    self._deliver(sorted(kept.items(), key=operator.itemgetter(0)))
                    kept.clear()
            if is_over:
                self.longest = max(self.longest, number if length is None else length)
                self._delivery.wait(_PATIENCE)

        return receive

    def _deliver(self, found: list[tuple[int, Callable[[], Taps]]]) -> None:
        if not self._reader.off:
            for step, unpack in found:
                self._delivery.put(functools.partial(self._read, step, unpack))

    def _read(self, step: int, unpack: Callable[[], Taps]) -> Report:
        return self._reader.read(step, unpack)


@dataclasses.dataclass(frozen=True)
class _StreamTransform(Transform):
    """A transform that streams the outermost loops of a program."""

    plan: Plan
    every: int
    channel: _Channel

    @property
    def is_reusable(self) -> bool:
        return False  # the sinks belong to one stream

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        if active_policy() is not None:
            raise TypeError(
                "tapax.stream was called inside another function of tapax, such as a capture, "
                "which would see the loop in chunks. Stream that function instead: "
                "tapax.stream(tapax.edit(fn, ...))."
            )
        hooks = StreamHooks(self.plan, self.every, self.channel.receiver)
        # The walk itself records nothing, because only the loops emit statistics.
        walk = Walk(dataclasses.replace(self.plan, values=None, grads=None), hooks=hooks)
        outs = call.program.run(walk, call.arrays)
        _verify(self.plan, walk, hooks)
        return outs, ()


def _verify(plan: Plan, walk: Walk, hooks: StreamHooks) -> None:
    """Raise if a selection asks for statistics that are not streamed."""
    if not hooks.loops:
        raise SiteError(
            "The function has no loop to stream from: no lax.scan, fori_loop or while_loop. "
            "tapax.monitor watches a step that is called in a Python loop."
        )
    values, grads = ([e.site for e in hooks.entries if e.grad == grad] for grad in (False, True))
    reduced = [(e.site, e.reduction.reducer) for e in hooks.entries if e.reduction is not None]
    plan.verify_reduced(reduced, walk.refused)
    plan.verify(walk.sites, values, grads, walk.lost)
    for sites, selection in ((values, plan.values), (grads, plan.grads)):
        for part in flatten(selection):
            chosen = getattr(part, "selection", part)
            if is_exact(chosen) and not any(matches(chosen, site) for site in sites):
                raise SiteError(
                    f"The site {chosen!r} is selected, but it is not inside a loop, and "
                    "`stream` takes only sites in loops. Capture it, or select others."
                )
    if not hooks.entries:
        names = ", ".join(list(dict.fromkeys(site.name for site in walk.sites))[:5])
        raise SiteError(
            "No selected site is in a loop, so there is nothing to stream. "
            + (f"The function has the sites {names}." if names else "The function has no sites.")
            + " Mark values in the body of the loop with tapax.sow(value, name)."
        )
