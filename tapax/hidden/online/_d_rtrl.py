"""Diagonal real-time recurrent learning."""

from collections.abc import Callable
from typing import Any

from tapax.hidden.online._diagonal_rule import (
    EvaluatedGroup,
    Trace,
    TracedWeight,
    make_diagonal_rule,
)
from tapax.hidden.online._learner import OnlineRule


def d_rtrl(
    step: Callable[..., Any],
    loss: Callable[..., Any],
    *,
    signal: str = "new",
    indirect: str = "trace",
) -> OnlineRule:
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

    def find_signal(here: EvaluatedGroup) -> Any:
        return here.now.whole_gradients[1] if signal == "old" else _pull_back(here)

    def learn(
        here: EvaluatedGroup, weight: TracedWeight, given: Any, old: Trace
    ) -> tuple[list[Any], Trace]:
        terms = [weight.layout.contract(given[k], eps) for k, eps in old.items()]
        return terms, here.advance(weight, old, tuple(old))

    return make_diagonal_rule(step, loss, indirect, find_signal, learn, signal=signal, whole=True)


def _pull_back(here: EvaluatedGroup) -> Trace:
    """Pulls the signal back to the old states, through the units themselves and beside them."""
    signal = here.now.compute_signal(here.group)
    beside = here.now.beside_gradients[1]
    made = {}
    for j in here.group.kept:
        total = beside[j]
        for k in here.group.states:
            if (k, j) in here.group.carries:
                total = total + signal[k] * here.carried[k, j]
        made[j] = total
    return made
