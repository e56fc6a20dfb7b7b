"""pp-prop: traces of rank one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax.hidden.online._layout import Layout, Product
from tapax.hidden.online._learner import (
    Learned,
    Memory,
    Online,
    check_decay,
    check_traces,
    settled,
    state_of,
    wide,
)
from tapax.hidden.online._moment import Moment, finished, moment
from tapax.hidden.online._plan import Group, Source
from tapax.hidden.online._program import Program
from tapax.hidden.online._traces import (
    advanced,
    diagonal_plan,
    instant,
    kept,
    summed,
    traced,
    zeros,
)


def pp_prop(
    step: Callable[..., Any],
    loss: Callable[..., Any],
    decay: float,
    *,
    indirect: str = "trace",
) -> Online:
    """The influence of a matrix is kept as a product of two vectors, smoothed over time.

    One is of the data that the matrix is multiplied with, `x[t] = decay * x[t-1] + data`; the other
    of the units, `f[t] = decay * D f[t-1] + (1 - decay) * dh/dy`, with `D` the derivative of a unit
    by itself, and divided by `1 - decay**t` where it is used. So memory and work are those of the
    state, not of the parameters. With a decay of 0 there is no memory of the past at all; the
    closer to 1, the further back it goes, and the more what happened at different times is mixed.

    Biases, gains and other weights used element by element have the traces of `d_rtrl`, which are
    no larger.

    Wang et al., Model-agnostic linear-memory online learning in spiking neural networks, 2026
    (doi:10.1038/s41467-026-68453-w), there also ES-D-RTRL.
    """
    planned = diagonal_plan(step, loss, indirect)
    check_decay(decay)

    def empty(program: Program, groups: Any) -> Any:
        return [[_empty(program, g, s, lay) for _, s, lay in traced(program, g)] for g in groups]

    def init(params: Any, state: Any, *inputs: Any) -> Memory:
        traces = empty(*planned(params, state, inputs))
        return Memory(settled(state), traces, count=jnp.zeros((), jnp.int32))

    def update(
        memory: Memory, params: Any, *inputs: Any, target: Any = None
    ) -> tuple[Learned, Memory]:
        program, groups = planned(params, state_of(memory), inputs)
        check_traces(memory, jax.eval_shape(lambda: empty(program, groups)))
        now, back = moment(step, program, params, memory.state, inputs, loss, target)
        grads, olds = now.beside
        grads, traces = list(grads), []
        for group, before in zip(groups, memory.traces, strict=True):
            carried, driven = now.units(group)
            signal = now.signal(group)
            made = []
            for (i, source, lay), old in zip(traced(program, group), before, strict=True):
                if isinstance(lay, Product):
                    new = _smoothed(now, group, source, lay, carried, driven[i], old, decay)
                else:
                    new = advanced(now, group, i, lay, carried, driven[i], old, source.states)
                at = source.weight
                for given, trace, steps in ((signal, new, 1), (olds, old, 0)):
                    some = {k: given[k] for k in group.states if steps or k in group.read}
                    more = _contracted(lay, some, trace, _scale(decay, memory.count + steps))
                    grads[at] = grads[at] if more is None else summed(grads[at], more)
                made.append(_kept(lay, new, kept(group, source)))
            for source in group.sources:
                if not source.traced:
                    grads[source.weight] += instant(now, group, source, signal)
            traces.append(made)
        learned = finished(now, back, params, grads)
        return learned, Memory(now.state, traces, count=memory.count + 1)

    return Online(init, update)


def _scale(decay: float, count: Any) -> Any:
    """What the smoothed derivatives of units are to be multiplied with after some steps."""
    return jnp.where(count > 0, 1 / (1 - decay ** jnp.maximum(count, 1)), 0)


def _empty(program: Program, group: Group, source: Source, lay: Layout) -> Any:
    if not isinstance(lay, Product):
        return zeros(program, lay, kept(group, source))
    b, d, c, w = lay.sizes
    assert source.dot is not None
    data = jnp.zeros((b, d, c), wide(source.dot.data.aval.dtype))
    states = kept(group, source)
    return data, {k: jnp.zeros((b, d, w), wide(program.states[k].dtype)) for k in states}


def _smoothed(
    now: Moment,
    group: Group,
    source: Source,
    lay: Product,
    carried: Any,
    driven: Any,
    old: Any,
    decay: float,
) -> Any:
    data, units = old
    assert source.dot is not None
    fresh = lay.factor(now.data[source.dot.at])
    data = decay * data + fresh.astype(data.dtype)
    made = {}
    for k in source.states:
        total = (1 - decay) * lay.result(driven[k])
        for j, x in units.items():
            if (k, j) in group.carries:
                total = total + decay * lay.at(carried[k, j]) * x
        made[k] = total.astype(wide(now.olds[k].dtype))
    return data, made


def _contracted(lay: Layout, signal: Any, trace: Any, scale: Any) -> Any:
    if isinstance(lay, Product):
        data, units = trace
        parts = [lay.at(signal[k]) * x for k, x in units.items() if k in signal]
        return lay.outer(sum(parts) * scale.astype(data.dtype), data) if parts else None
    parts = [lay.contract(signal[k], x) for k, x in trace.items() if k in signal]
    return sum(parts) if parts else None


def _kept(lay: Layout, new: Any, states: tuple[int, ...]) -> Any:
    if isinstance(lay, Product):
        return new[0], {k: new[1][k] for k in states}
    return {k: new[k] for k in states}
