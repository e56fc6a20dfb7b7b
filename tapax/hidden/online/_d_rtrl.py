"""Diagonal real-time recurrent learning."""

from collections.abc import Callable
from typing import Any

import jax

from tapax.hidden.online import _learner, _traces
from tapax.hidden.online._evaluated_step import collect_gradients, evaluate_step


def d_rtrl(
    step: Callable[..., Any],
    loss: Callable[..., Any],
    *,
    signal: str = "new",
    indirect: str = "trace",
) -> _learner.OnlineRule:
    """Diagonal RTRL: for each weight, its influence on the units that it drives is kept.

    To the gradient within a step, which is exact, comes that through the old states: their signal
    times the traces. `signal` says which one. "new": the gradient by the new states, taken back
    through each unit itself, as in the paper. "old": the gradient by the old states, taken back
    through the whole step, matrices from state to state included. It costs no more, is as exact
    where the first is, and nearer to the true gradient where it is not.

    Wang et al., Model-agnostic linear-memory online learning in spiking neural networks, 2026
    (doi:10.1038/s41467-026-68453-w); with the diagonal of the matrices from state to state it would
    be the SnAp-1 of Menick et al., 2020 (arXiv:2006.07232).
    """
    planned = _traces.plan_diagonal_rule(step, loss, indirect, signal)

    def empty(program: Any, groups: Any) -> Any:
        return [
            [
                _traces.make_zeros(program, lay, _traces.list_kept(g, s))
                for _, s, lay in _traces.list_traced(program, g)
            ]
            for g in groups
        ]

    def init(params: Any, state: Any, *inputs: Any) -> _learner.OnlineMemory:
        traces = empty(*planned(params, state, inputs))
        return _learner.OnlineMemory(_learner.settle_dtypes(state), traces)

    def update(
        memory: _learner.OnlineMemory, params: Any, *inputs: Any, target: Any = None
    ) -> tuple[_learner.OnlineGradients, _learner.OnlineMemory]:
        program, groups = planned(params, _learner.get_state(memory), inputs)
        _learner.check_traces(memory, jax.eval_shape(lambda: empty(program, groups)))
        now, back = evaluate_step(step, program, params, memory.state, inputs, loss, target)
        grads, given = now.whole_gradients
        grads, traces = list(grads), []
        for group, olds in zip(groups, memory.traces, strict=True):
            carried, driven = now.differentiate_units(group)
            if signal == "new":
                given = _traces.pull_back_signal(
                    group, now.compute_signal(group), carried, now.beside_gradients[1]
                )
            made = []
            for (i, source, lay), old in zip(
                _traces.list_traced(program, group), olds, strict=True
            ):
                for k, eps in old.items():
                    at = source.weight
                    grads[at] = _traces.add_gradient(grads[at], lay.contract(given[k], eps))
                made.append(
                    _traces.advance(now, group, i, lay, carried, driven[i], old, tuple(old))
                )
            traces.append(made)
        return collect_gradients(now, back, params, grads), _learner.OnlineMemory(now.state, traces)

    return _learner.OnlineRule(init, update)
