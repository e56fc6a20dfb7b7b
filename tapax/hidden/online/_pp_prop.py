"""pp-prop: traces of rank one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax.hidden.online import _learner, _traces
from tapax.hidden.online._evaluated_step import EvaluatedStep, collect_gradients, evaluate_step
from tapax.hidden.online._flat_step import FlatStep
from tapax.hidden.online._influence_layouts import InfluenceLayout, ProductLayout
from tapax.hidden.online._unit_groups import DrivingWeight, UnitGroup


def pp_prop(
    step: Callable[..., Any], loss: Callable[..., Any], decay: float, *, indirect: str = "trace"
) -> _learner.OnlineRule:
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
    planned = _traces.plan_diagonal_rule(step, loss, indirect)
    _learner.check_decay(decay)

    def empty(program: FlatStep, groups: Any) -> Any:
        return [
            [_make_empty(program, g, s, lay) for _, s, lay in _traces.list_traced(program, g)]
            for g in groups
        ]

    def init(params: Any, state: Any, *inputs: Any) -> _learner.OnlineMemory:
        traces = empty(*planned(params, state, inputs))
        return _learner.OnlineMemory(
            _learner.settle_dtypes(state), traces, count=jnp.zeros((), jnp.int32)
        )

    def update(
        memory: _learner.OnlineMemory, params: Any, *inputs: Any, target: Any = None
    ) -> tuple[_learner.OnlineGradients, _learner.OnlineMemory]:
        program, groups = planned(params, _learner.get_state(memory), inputs)
        _learner.check_traces(memory, jax.eval_shape(lambda: empty(program, groups)))
        now, back = evaluate_step(step, program, params, memory.state, inputs, loss, target)
        grads, olds = now.beside_gradients
        grads, traces = list(grads), []
        for group, before in zip(groups, memory.traces, strict=True):
            carried, driven = now.differentiate_units(group)
            signal = now.compute_signal(group)
            made = []
            for (i, source, lay), old in zip(
                _traces.list_traced(program, group), before, strict=True
            ):
                if isinstance(lay, ProductLayout):
                    new = _smooth(now, group, source, lay, carried, driven[i], old, decay)
                else:
                    new = _traces.advance(
                        now, group, i, lay, carried, driven[i], old, source.states
                    )
                at = source.weight
                for given, trace, steps in ((signal, new, 1), (olds, old, 0)):
                    some = {k: given[k] for k in group.states if steps or k in group.read}
                    more = _contract(lay, some, trace, _compute_scale(decay, memory.count + steps))
                    grads[at] = grads[at] if more is None else _traces.add_gradient(grads[at], more)
                made.append(_keep(lay, new, _traces.list_kept(group, source)))
            for source in group.sources:
                if not source.traced:
                    grads[source.weight] += _traces.compute_instant(now, group, source, signal)
            traces.append(made)
        learned = collect_gradients(now, back, params, grads)
        return learned, _learner.OnlineMemory(now.state, traces, count=memory.count + 1)

    return _learner.OnlineRule(init, update)


def _compute_scale(decay: float, count: Any) -> Any:
    """What the smoothed derivatives of units are to be multiplied with after some steps."""
    return jnp.where(count > 0, 1 / (1 - decay ** jnp.maximum(count, 1)), 0)


def _make_empty(
    program: FlatStep, group: UnitGroup, source: DrivingWeight, lay: InfluenceLayout
) -> Any:
    if not isinstance(lay, ProductLayout):
        return _traces.make_zeros(program, lay, _traces.list_kept(group, source))
    b, d, c, w = lay.sizes
    assert source.dot is not None
    data = jnp.zeros((b, d, c), _learner.widen_dtype(source.dot.data.aval.dtype))
    states = _traces.list_kept(group, source)
    return data, {
        k: jnp.zeros((b, d, w), _learner.widen_dtype(program.states[k].dtype)) for k in states
    }


def _smooth(
    now: EvaluatedStep,
    group: UnitGroup,
    source: DrivingWeight,
    lay: ProductLayout,
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
        made[k] = total.astype(_learner.widen_dtype(now.olds[k].dtype))
    return data, made


def _contract(lay: InfluenceLayout, signal: Any, trace: Any, scale: Any) -> Any:
    if isinstance(lay, ProductLayout):
        data, units = trace
        parts = [lay.at(signal[k]) * x for k, x in units.items() if k in signal]
        return lay.outer(sum(parts) * scale.astype(data.dtype), data) if parts else None
    parts = [lay.contract(signal[k], x) for k, x in trace.items() if k in signal]
    return sum(parts) if parts else None


def _keep(lay: InfluenceLayout, new: Any, states: tuple[int, ...]) -> Any:
    if isinstance(lay, ProductLayout):
        return new[0], {k: new[1][k] for k in states}
    return {k: new[k] for k in states}
