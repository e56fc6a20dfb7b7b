"""Diagonal real-time recurrent learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tapax.hidden.online._learner import Learned, Memory, Online, check_traces, settled, state_of
from tapax.hidden.online._moment import finished, moment
from tapax.hidden.online._traces import (
    advanced,
    back_through,
    diagonal_plan,
    kept,
    summed,
    traced,
    zeros,
)


def d_rtrl(
    step: Callable[..., Any],
    loss: Callable[..., Any],
    *,
    signal: str = "new",
    indirect: str = "trace",
) -> Online:
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
    planned = diagonal_plan(step, loss, indirect, signal)

    def empty(program: Any, groups: Any) -> Any:
        return [
            [zeros(program, lay, kept(g, s)) for _, s, lay in traced(program, g)] for g in groups
        ]

    def init(params: Any, state: Any, *inputs: Any) -> Memory:
        traces = empty(*planned(params, state, inputs))
        return Memory(settled(state), traces)

    def update(
        memory: Memory, params: Any, *inputs: Any, target: Any = None
    ) -> tuple[Learned, Memory]:
        program, groups = planned(params, state_of(memory), inputs)
        check_traces(memory, jax.eval_shape(lambda: empty(program, groups)))
        now, back = moment(step, program, params, memory.state, inputs, loss, target)
        grads, given = now.whole
        grads, traces = list(grads), []
        for group, olds in zip(groups, memory.traces, strict=True):
            carried, driven = now.units(group)
            if signal == "new":
                given = back_through(group, now.signal(group), carried, now.beside[1])
            made = []
            for (i, source, lay), old in zip(traced(program, group), olds, strict=True):
                for k, eps in old.items():
                    at = source.weight
                    grads[at] = summed(grads[at], lay.contract(given[k], eps))
                made.append(advanced(now, group, i, lay, carried, driven[i], old, tuple(old)))
            traces.append(made)
        return finished(now, back, params, grads), Memory(now.state, traces)

    return Online(init, update)
