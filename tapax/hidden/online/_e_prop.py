"""e-prop: eligibility traces and learning signals."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax._frameworks.recurrent_cells import HiddenError
from tapax._jax import Value
from tapax.hidden.online._diagonal_rule import (
    EvaluatedGroup,
    Trace,
    TracedWeight,
    make_diagonal_rule,
)
from tapax.hidden.online._flat_step import FlatStep, is_float
from tapax.hidden.online._learner import OnlineRule, check_decay, widen_dtype
from tapax.hidden.online._unit_groups import UnitGroup

_FEEDBACK = ("symmetric", "random")


def e_prop(
    step: Callable[..., Any],
    loss: Callable[..., Any],
    *,
    feedback: str = "symmetric",
    decay: float = 0.0,
    key: Value = None,
    indirect: str = "trace",
) -> OnlineRule:
    """Learn by e-prop: multiply the eligibility traces of `d_rtrl` by a learning signal.

    A leaky read-out is a state that is the output: other states drive it, and it drives none. The
    past still acts through it, so the rule filters the traces of the states that it reads,
    `e[t] = decay * e[t-1] + eps[t]`, but not the traces of the read-out itself.

    Bellec et al., A solution to the learning dilemma for recurrent networks of spiking neurons,
    2020 (doi:10.1038/s41467-020-17236-y).

    Args:
        step: A pure function `step(params, state, *inputs) -> (state, out)`.
        loss: A function `loss(out, target)` that returns one real number.
        feedback: The learning signal. `"symmetric"` is the gradient of the loss with respect to the
            hidden states; `"random"` is the gradient with respect to the output, multiplied by
            fixed random matrices, so that the signal needs no weight of the read-out. For
            `"random"`, the axes before the last that the output shares with a state count as a
            batch. The read-out itself has its true gradient in either case.
        decay: The decay of a leaky read-out, in [0, 1).
        key: The random key of `"random"` feedback; None for `"symmetric"`. `init` makes the
            matrices, and puts them into the memory.
        indirect: The treatment of parameters that drive many units: `"trace"`, `"instant"` or
            `"refuse"`; see `tapax.hidden.online`.

    Returns:
        An `OnlineRule`.

    Raises:
        HiddenError: If `step` or `loss` is not a function, `feedback` or `indirect` is not one of
            the choices, or `decay` is out of range; if `"random"` has no `key`, or `"symmetric"`
            has one. `init` and `update` raise it if their arguments do not fit the step.

    Example:
        >>> import jax.numpy as jnp
        >>> from tapax.hidden import online
        >>> step = lambda w, h, x: (0.5 * h + w * x, h)
        >>> loss = lambda out, target: jnp.sum((out - target) ** 2)
        >>> rule, w, h = online.e_prop(step, loss), jnp.array([1.0, 2.0]), jnp.zeros(2)
        >>> memory = rule.init(w, h, jnp.zeros(2))
        >>> for x in jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]):
        ...     learned, memory = rule.update(memory, w, x, target=0.0)
        >>> float(learned.loss), learned.grads.tolist()
        (4.25, [0.5, 4.0])
    """
    check_decay(decay)
    if feedback not in _FEEDBACK:
        raise HiddenError(f"`feedback` must be 'symmetric' or 'random', but is {feedback!r}.")
    if (feedback == "random") != (key is not None):
        raise HiddenError(
            f"`feedback` is {feedback!r} and `key` is {'not ' if key is not None else ''}None, but "
            "random feedback needs a random key, `jax.random.key(0)`, and symmetric feedback takes "
            "none."
        )

    def start_trace(weight: TracedWeight) -> tuple[Trace, Trace]:
        filtered = weight.source.states if decay and not weight.group.readout else ()
        return weight.start(), weight.make_zeros(filtered)

    def start_fields(program: FlatStep, groups: Any) -> dict[str, Any]:
        return {} if key is None else {"feedback": _make_matrices(key, program, groups)}

    def is_symmetric(group: UnitGroup) -> bool:
        return key is None or group.readout

    def find_signal(here: EvaluatedGroup) -> Trace:
        if is_symmetric(here.group):
            return here.now.compute_signal(here.group)
        return _broadcast_errors(here)

    def learn(
        here: EvaluatedGroup, weight: TracedWeight, signal: Trace, old: tuple[Trace, Trace]
    ) -> tuple[list[Any], tuple[Trace, Trace]]:
        eps, bars = old
        new = here.advance(weight, eps, weight.source.states)
        more = {k: decay * bar + new[k] for k, bar in bars.items()}
        contract = weight.layout.contract
        terms = [contract(signal[k], x) for k, x in (more or new).items()]
        if is_symmetric(here.group):
            olds, past = here.now.beside_gradients[1], bars or eps
            terms += [contract(olds[k], x) for k, x in past.items() if k in here.group.read]
        return terms, ({k: new[k] for k in eps}, more)

    start = {"start_trace": start_trace, "start_fields": start_fields}
    return make_diagonal_rule(step, loss, indirect, find_signal, learn, **start)


def _count_batch_axes(out: tuple[int, ...], state: tuple[int, ...]) -> int:
    """Count the leading axes of a batch."""
    n = 0
    while n < min(len(out), len(state)) - 1 and out[n] == state[n]:
        n += 1
    return n


def _make_matrices(key: Value, program: FlatStep, groups: Any) -> Any:
    """Make a fixed random matrix for every output and every state on which it depends."""
    shapes = [v.aval.shape for v in program.outs if is_float(v.aval)]
    made: dict[int, list[Any]] = {}
    for group in groups:
        for k in () if group.readout else sorted(group.seen):
            made[k] = []
            for i, out in enumerate(shapes):
                n = _count_batch_axes(out, group.shape)
                one = jax.random.fold_in(jax.random.fold_in(key, k), i)
                size = math.prod(out[n:]), math.prod(group.shape[n:])
                matrix = jax.random.normal(one, size, widen_dtype(program.states[k].dtype))
                made[k].append(matrix / math.sqrt(max(size[1], 1)))
    return made


def _broadcast_errors(here: EvaluatedGroup) -> Trace:
    """Multiply the gradients with respect to the outputs by the matrices."""
    now, group = here.now, here.group
    errors = now.differentiate_output()
    dtypes = {k: widen_dtype(now.olds[k].dtype) for k in group.states}
    signal = {k: jnp.zeros(group.shape, dtype) for k, dtype in dtypes.items()}
    for k in group.seen:
        for error, matrix in zip(errors, here.memory.feedback[k], strict=True):
            n = _count_batch_axes(error.shape, group.shape)
            rows = error.reshape(*error.shape[:n], -1).astype(matrix.dtype)
            signal[k] += (rows @ matrix).reshape(group.shape)
    return signal
