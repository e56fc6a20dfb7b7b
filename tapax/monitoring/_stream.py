"""`stream`: statistics out of a loop while it runs.

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

See `_streamed_loops` for what becomes of the loop, and what it costs.
"""

from __future__ import annotations

import dataclasses
import functools
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
"""How many seconds the end of a loop waits for slow sinks."""


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
    """The function `fn`, whose outermost loop sends statistics to sinks while it runs.

    The iterations 0, `every`, 2 * `every`, ... of a `lax.scan`, `fori_loop` or `while_loop` make a
    record each. What the function returns is what it returns without the stream. `values` and
    `grads` select sites inside the loop and say which statistics to take, as in `tapax.monitor`:
    a selection without a reducer stands for the root mean square. A site in a loop inside the
    streamed one has a number for each iteration of that; `tapax.reduce.rms.total` merges them.
    Examples of a `vmap`, inside or around the stream, and devices are merged, as in a capture.

    `to` and `alerts` are those of `tapax.monitor`. `start` is the number of the first iteration. By
    default it is 0, or, if `to` has a log with records already, the first multiple of `every` after
    their steps, with a warning. The next call goes on with the next number; inside another jitted
    function every call begins at `start`.

    A call returns when the loop is over and its records are delivered. Where the stream is called
    inside `jax.jit` or `jax.vmap`, records are there when the results are. `close`, or the end of a
    `with` block, closes the sinks. A sink that raises is dropped, with a warning.

    Raises `SiteError` if the function has no loop, if nothing that is selected is in one, or if a
    site that is named exactly is not.
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
    """A function whose outermost loop is streamed: see `stream`.

    `step_number` is the number of the first iteration of the next call, and may be set. `alerts`
    are those that went off so far.
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
        # Last, so that nothing is left open if an argument is wrong.
        sinks = make(to)
        first = next_step(sinks, every) if start is None else start
        self._delivery = Delivery(sinks, self._reader.stop)
        self._channel = _Channel(self._reader, self._delivery, every, first)
        self._call = TransformedFunction(fn, _StreamTransform(plan, every, self._channel))
        # A program that was traced with the stream in it may outlive it, and has the channel.
        weakref.finalize(self._channel, self._delivery.end).atexit = False

    def __repr__(self) -> str:
        return f"stream({name_of(self._fn)})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not _jax.trace_state_clean():
            return self._call((), args, kwargs)
        self._channel.longest = 0
        out = jax.block_until_ready(self._call((), args, kwargs))
        jax.effects_barrier()
        self._delivery.wait(_PATIENCE)
        self.step_number += self._channel.longest
        return out

    @property
    def step_number(self) -> int:
        """The number of the first iteration of the next call."""
        return self._channel.first

    @step_number.setter
    def step_number(self, number: int) -> None:
        self._channel.first = check_integer("step_number", number, 0)

    @property
    def alerts(self) -> list[AlertEvent]:
        """The alerts that went off so far; all of them, once the stream is closed."""
        return list(self._reader.alerts)

    def close(self) -> None:
        """Waits until everything is delivered, and closes the sinks."""
        jax.effects_barrier()
        self._reader.stop()
        self._delivery.close()

    def __enter__(self) -> Stream[P, R]:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


class _Channel:
    """Takes what loops emit, on threads of JAX, to the delivery.

    `first` is the number of their first iteration, `longest` how often the longest of them ran.
    """

    def __init__(self, reader: Reader, delivery: Delivery, every: int, first: int):
        self.first, self.longest = first, 0
        self._reader, self._delivery, self._every = reader, delivery, every
        self._lock = threading.Lock()

    def receiver(self, *, length: int | None, reverse: bool) -> Receiver:
        """Makes the receiver of a loop of this `length`, None if that is not known.

        The records of a loop that runs backwards are kept until the last of them has come.
        """
        kept: list[tuple[int, Callable[[], Taps]]] = []
        last = 0 if reverse or not length else (length - 1) // self._every * self._every

        def receive(number: int, unpack: Callable[[], Taps] | None) -> None:
            is_over = unpack is None if length is None else number == last
            with self._lock:
                if unpack is not None:
                    kept.append((self.first + number, unpack))
                if is_over or not reverse:
                    self._deliver(kept[::-1] if reverse else kept)
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
    """Evaluates the program with its outermost loops streamed."""

    plan: Plan
    every: int
    channel: _Channel

    @property
    def is_reusable(self) -> bool:
        return False  # the sinks are those of one stream

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        if active_policy() is not None:
            raise TypeError(
                "tapax.stream was called inside another function of tapax, such as a capture, "
                "which would see the loop in chunks. Stream that function instead: "
                "tapax.stream(tapax.edit(fn, ...))."
            )
        hooks = StreamHooks(self.plan, self.every, self.channel.receiver)
        # The walk itself records nothing: what the loops do not emit is not wanted.
        walk = Walk(dataclasses.replace(self.plan, values=None, grads=None), hooks=hooks)
        outs = call.program.run(walk, call.arrays)
        _verify(self.plan, walk, hooks)
        return outs, ()


def _verify(plan: Plan, walk: Walk, hooks: StreamHooks) -> None:
    """Raises for what was asked for and is not streamed."""
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
                    f"The site {chosen!r} is selected, but it is in no loop of the function, and "
                    "only sites inside a loop are streamed. Capture it, or select others."
                )
    if not hooks.entries:
        names = ", ".join(list(dict.fromkeys(site.name for site in walk.sites))[:5])
        raise SiteError(
            "Nothing that is selected is in a loop, so there is nothing to stream. "
            + (f"The function has the sites {names}." if names else "The function has no sites.")
            + " Mark values in the body of the loop with tapax.sow(value, name)."
        )
