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
    """Learn by pp-prop, which traces the influence of a matrix as a product of two vectors.

    The vectors are smoothed over time. One traces the data that multiply the matrix,
    `x[t] = decay * x[t-1] + data`. The other traces the units,
    `f[t] = decay * D f[t-1] + (1 - decay) * dh/dy`, where `D` is the derivative of a unit with
    respect to itself; the rule divides `f[t]` by `1 - decay**t` before use. So memory and work
    scale with the state instead of the parameters. Biases, gains and other weights used element by
    element have the traces of `d_rtrl`, which are no larger.

    Wang et al., Model-agnostic linear-memory online learning in spiking neural networks, 2026
    (doi:10.1038/s41467-026-68453-w), who also call it ES-D-RTRL.

    Args:
        step: A pure function `step(params, state, *inputs) -> (state, out)`.
        loss: A function `loss(out, target)` that returns one real number.
        decay: The decay of both vectors, in [0, 1). With 0 there is no memory of the past; a decay
            closer to 1 reaches further back, and mixes events at different times more.
        indirect: The treatment of parameters that drive many units: `"trace"`, `"instant"` or
            `"refuse"`; see `tapax.hidden.online`.

    Returns:
        An `OnlineRule`.

    Raises:
        HiddenError: If `step` or `loss` is not a function, `decay` is out of range, or `indirect`
            is not one of the choices. `init` and `update` raise it if their arguments do not fit
            the step.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tapax.hidden import online
        >>> step = lambda w, h, x: (0.5 * h + x @ w, h)
        >>> loss = lambda out, target: jnp.sum((out - target) ** 2)
        >>> rule, w, h = online.pp_prop(step, loss, decay=0.9), jnp.eye(2), jnp.array([1.0, -1.0])
        >>> memory = rule.init(w, h, jnp.zeros(2))
        >>> learned, memory = rule.update(memory, w, jnp.array([0.5, 2.0]), target=0.0)
        >>> float(learned.loss), memory.state.tolist()
        (2.0, [1.0, 1.5])
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
    """Compute the factor of the smoothed derivatives of units after some steps."""
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
