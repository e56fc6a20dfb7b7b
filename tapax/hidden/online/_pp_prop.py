"""pp-prop: traces of rank one."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tapax._jax import Value
from tapax.hidden.online._diagonal_rule import (
    EvaluatedGroup,
    Trace,
    TracedWeight,
    make_diagonal_rule,
)
from tapax.hidden.online._influence_layouts import InfluenceLayout, ProductLayout
from tapax.hidden.online._learner import OnlineRule, check_decay, widen_dtype


def pp_prop(
    step: Callable[..., Any], loss: Callable[..., Any], decay: float, *, indirect: str = "trace"
) -> OnlineRule:
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
    check_decay(decay)

    def find_signal(here: EvaluatedGroup) -> Trace:
        return here.now.compute_signal(here.group)

    def learn(
        here: EvaluatedGroup, weight: TracedWeight, signal: Trace, old: Value
    ) -> tuple[list[Any], Any]:
        olds, count = here.now.beside_gradients[1], here.memory.count
        read = {k: olds[k] for k in here.group.read}
        if isinstance(weight.layout, ProductLayout):
            new = _smooth(here, weight, weight.layout, old, decay)
            kept = new[0], {k: new[1][k] for k in old[1]}
        else:
            new = here.advance(weight, old, weight.source.states)
            kept = {k: new[k] for k in old}
        terms = [
            _contract(weight.layout, signal, new, _compute_scale(decay, count + 1)),
            _contract(weight.layout, read, old, _compute_scale(decay, count)),
        ]
        return [term for term in terms if term is not None], kept

    def start_fields(*_: Any) -> dict[str, Any]:
        return {"count": jnp.zeros((), jnp.int32)}

    start = {"start_trace": _start_trace, "start_fields": start_fields}
    return make_diagonal_rule(step, loss, indirect, find_signal, learn, **start)


def _compute_scale(decay: float, count: Any) -> Any:
    """What the smoothed derivatives of units are to be multiplied with after some steps."""
    return jnp.where(count > 0, 1 / (1 - decay ** jnp.maximum(count, 1)), 0)


def _start_trace(weight: TracedWeight) -> Any:
    trace = weight.start()
    if not isinstance(weight.layout, ProductLayout):
        return trace
    b, d, c, w = weight.layout.sizes
    assert weight.source.dot is not None
    data = jnp.zeros((b, d, c), widen_dtype(weight.source.dot.data.aval.dtype))
    return data, {k: jnp.zeros((b, d, w), x.dtype) for k, x in trace.items()}


def _smooth(
    here: EvaluatedGroup, weight: TracedWeight, lay: ProductLayout, old: Value, decay: float
) -> Any:
    data, units = old
    source = weight.source
    assert source.dot is not None
    fresh = lay.factor(here.now.data[source.dot.at])
    data = decay * data + fresh.astype(data.dtype)
    made = {}
    for k in source.states:
        total = (1 - decay) * lay.result(here.driven[source][k])
        for j, x in units.items():
            if (k, j) in here.group.carries:
                total = total + decay * lay.at(here.carried[k, j]) * x
        made[k] = total.astype(widen_dtype(here.now.olds[k].dtype))
    return data, made


def _contract(lay: InfluenceLayout, signal: Trace, trace: Any, scale: Any) -> Any:
    if isinstance(lay, ProductLayout):
        data, units = trace
        parts = [lay.at(signal[k]) * x for k, x in units.items() if k in signal]
        return lay.outer(sum(parts) * scale.astype(data.dtype), data) if parts else None
    parts = [lay.contract(signal[k], x) for k, x in trace.items() if k in signal]
    return sum(parts) if parts else None
