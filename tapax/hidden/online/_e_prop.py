"""e-prop: eligibility traces and learning signals."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax._frameworks.recurrent_cells import HiddenError
from tapax.hidden.online import _learner, _traces
from tapax.hidden.online._evaluated_step import EvaluatedStep, collect_gradients, evaluate_step
from tapax.hidden.online._flat_step import FlatStep, is_float
from tapax.hidden.online._unit_groups import DrivingWeight, UnitGroup

_FEEDBACK = ("symmetric", "random")


def e_prop(
    step: Callable[..., Any],
    loss: Callable[..., Any],
    *,
    feedback: str = "symmetric",
    decay: float = 0.0,
    key: Any = None,
    indirect: str = "trace",
) -> _learner.OnlineRule:
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
    planned = _traces.plan_diagonal_rule(step, loss, indirect)
    _learner.check_decay(decay)
    if feedback not in _FEEDBACK:
        raise HiddenError(f"`feedback` is 'symmetric' or 'random', but is {feedback!r}.")
    if (feedback == "random") != (key is not None):
        raise HiddenError(
            f"`feedback` is {feedback!r} and `key` is {'not ' if key is not None else ''}None, but "
            "random feedback needs a random key to be made from, `jax.random.key(0)`, and other "
            "feedback takes none."
        )

    def filtered(group: UnitGroup, source: DrivingWeight) -> tuple[int, ...]:
        return source.states if decay and not group.readout else ()

    def empty(program: FlatStep, groups: Any) -> Any:
        def both(group: UnitGroup, source: DrivingWeight, lay: Any) -> Any:
            states = _traces.list_kept(group, source), filtered(group, source)
            return tuple(_traces.make_zeros(program, lay, part) for part in states)

        return [[both(g, s, lay) for _, s, lay in _traces.list_traced(program, g)] for g in groups]

    def init(params: Any, state: Any, *inputs: Any) -> _learner.OnlineMemory:
        program, groups = planned(params, state, inputs)
        matrices = () if key is None else _make_matrices(key, program, groups)
        return _learner.OnlineMemory(
            _learner.settle_dtypes(state), empty(program, groups), matrices
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
            symmetric = key is None or group.readout
            if symmetric:
                signal = now.compute_signal(group)
            else:
                signal = _broadcast_errors(now, group, memory.feedback)
            made = []
            for (i, source, lay), (eps, bars) in zip(
                _traces.list_traced(program, group), before, strict=True
            ):
                new = _traces.advance(now, group, i, lay, carried, driven[i], eps, source.states)
                more = {k: decay * bar + new[k] for k, bar in bars.items()}
                at = source.weight
                for k, x in (more or new).items():
                    grads[at] = _traces.add_gradient(grads[at], lay.contract(signal[k], x))
                for k, x in ((bars or eps) if symmetric else {}).items():
                    if k in group.read:
                        grads[at] = _traces.add_gradient(grads[at], lay.contract(olds[k], x))
                made.append(({k: new[k] for k in eps}, more))
            for source in group.sources:
                if not source.traced:
                    grads[source.weight] += _traces.compute_instant(now, group, source, signal)
            traces.append(made)
        learned = collect_gradients(now, back, params, grads)
        return learned, _learner.OnlineMemory(now.state, traces, memory.feedback)

    return _learner.OnlineRule(init, update)


def _list_output_shapes(program: FlatStep) -> list[tuple[int, ...]]:
    return [v.aval.shape for v in program.outs if is_float(v.aval)]


def _count_batch_axes(out: tuple[int, ...], state: tuple[int, ...]) -> int:
    """How many first axes are of a batch."""
    n = 0
    while n < min(len(out), len(state)) - 1 and out[n] == state[n]:
        n += 1
    return n


def _make_matrices(key: Any, program: FlatStep, groups: Any) -> Any:
    """For every state that is seen, and everything that is put out, a matrix of fixed numbers."""
    made: dict[int, list[Any]] = {}
    for group in groups:
        for k in () if group.readout else sorted(group.seen):
            made[k] = []
            for i, out in enumerate(_list_output_shapes(program)):
                n = _count_batch_axes(out, group.shape)
                one = jax.random.fold_in(jax.random.fold_in(key, k), i)
                size = math.prod(out[n:]), math.prod(group.shape[n:])
                matrix = jax.random.normal(one, size, _learner.widen_dtype(program.states[k].dtype))
                made[k].append(matrix / math.sqrt(max(size[1], 1)))
    return made


def _broadcast_errors(now: EvaluatedStep, group: UnitGroup, matrices: Any) -> dict[int, Any]:
    """The gradient by what is put out, through the matrices."""
    errors = now.differentiate_output()
    signal = {
        k: jnp.zeros(group.shape, _learner.widen_dtype(now.olds[k].dtype)) for k in group.states
    }
    for k in group.seen:
        for error, matrix in zip(errors, matrices[k], strict=True):
            n = _count_batch_axes(error.shape, group.shape)
            rows = error.reshape(*error.shape[:n], -1).astype(matrix.dtype)
            signal[k] += (rows @ matrix).reshape(group.shape)
    return signal
