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
    """e-prop: the eligibility traces of `d_rtrl`, times a learning signal.

    `feedback` says what the signal is. "symmetric": the gradient of the step's loss by the hidden
    states. "random": the gradient by what is put out, through fixed random matrices that `key`
    makes and `init` puts in the memory, so that no weight of the read-out is needed for it. Axes
    before the last that the output and a state have in common are of a batch. The read-out itself
    has the gradient that it has in either case.

    `decay` is that of a leaky read-out, one that is a state: others drive it, it drives none, and
    it is what is put out. What was there before still acts through it, so the traces of the states
    that it reads are filtered, `e[t] = decay * e[t-1] + eps[t]`; its own are not.

    Bellec et al., A solution to the learning dilemma for recurrent networks of spiking neurons,
    2020 (doi:10.1038/s41467-020-17236-y).
    """
    check_decay(decay)
    if feedback not in _FEEDBACK:
        raise HiddenError(f"`feedback` is 'symmetric' or 'random', but is {feedback!r}.")
    if (feedback == "random") != (key is not None):
        raise HiddenError(
            f"`feedback` is {feedback!r} and `key` is {'not ' if key is not None else ''}None, but "
            "random feedback needs a random key to be made from, `jax.random.key(0)`, and other "
            "feedback takes none."
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
    """How many first axes are of a batch."""
    n = 0
    while n < min(len(out), len(state)) - 1 and out[n] == state[n]:
        n += 1
    return n


def _make_matrices(key: Value, program: FlatStep, groups: Any) -> Any:
    """For every state that is seen, and everything that is put out, a matrix of fixed numbers."""
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
    """The gradient by what is put out, through the matrices."""
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
