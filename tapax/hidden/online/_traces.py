"""Traces that diagonal rules keep, and how they go from one step to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from tapax._frameworks.recurrent_cells import HiddenError
from tapax.hidden.online._layout import Layout, layout
from tapax.hidden.online._learner import Planned, check_loss, wide
from tapax.hidden.online._moment import Moment
from tapax.hidden.online._plan import INDIRECT, SIGNALS, Group, Source, plan
from tapax.hidden.online._program import Program, trace

Trace = dict[int, Any]
"""The influence of a weight on states, by their numbers."""


def diagonal_plan(step: Any, loss: Any, indirect: Any, signal: Any = "new") -> Planned:
    """The program of a step and its groups, for each kind of arguments."""
    check_loss(loss)
    for name, given, known in (("indirect", indirect, INDIRECT), ("signal", signal, SIGNALS)):
        if given not in known:
            expected = ", ".join(map(repr, known))
            raise HiddenError(f"`{name}` is one of {expected}, but is {given!r}.")

    def make(*args: Any) -> Any:
        program = trace(*args)
        return (program, plan(program, indirect, signal)), program.lasting

    return Planned(step, make)


def traced(program: Program, group: Group) -> Iterator[tuple[int, Source, Layout]]:
    """The sources of a group that have a trace, with their places in it."""
    for i, source in enumerate(group.sources):
        if source.traced:
            yield i, source, layout(program, group, source)


def zeros(program: Program, lay: Layout, states: Iterable[int]) -> Trace:
    """No influence yet."""
    return {k: jnp.zeros(lay.shape, wide(program.states[k].dtype)) for k in states}


def kept(group: Group, source: Source) -> tuple[int, ...]:
    """The states, of those that a weight reaches, whose traces the next step needs."""
    return tuple(k for k in group.kept if k in source.states)


def advanced(
    now: Moment,
    group: Group,
    index: int,
    lay: Layout,
    carried: Mapping[Any, Any],
    driven: Mapping[int, Any],
    old: Trace,
    states: Iterable[int],
) -> Trace:
    """The influence after a step: what was there, passed on, and what came with it."""
    source = group.sources[index]
    data = None if source.dot is None else now.data[source.dot.at]
    made = {}
    for k in states:
        if source.units is None:
            total = now.full(group, source, k)
        else:
            total = lay.fresh(driven[k], data if data is None else data.astype(wide(data.dtype)))
        for j, eps in old.items():
            if (k, j) in group.carries:
                total = total + lay.lift(carried[k, j]) * eps
        made[k] = total.astype(wide(now.olds[k].dtype))
    return made


def back_through(group: Group, signal: Mapping[int, Any], carried: Any, beside: Any) -> Trace:
    """The gradient of the loss by the old states, through the units themselves and beside them."""
    made = {}
    for j in group.kept:
        total = beside[j]
        for k in group.states:
            if (k, j) in group.carries:
                total = total + signal[k] * carried[k, j]
        made[j] = total
    return made


def instant(now: Moment, group: Group, source: Source, signal: Mapping[int, Any]) -> Any:
    """The gradient by a weight that no trace is kept of: that of what it does in this step."""
    return now.reached(group, source)(dict(signal))


def summed(weight: Any, more: Any) -> Any:
    """A gradient by a weight with some more of it, in its own type."""
    return weight + more.astype(weight.dtype)
