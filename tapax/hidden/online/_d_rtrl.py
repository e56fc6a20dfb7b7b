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
    """Learn by diagonal RTRL, which traces the influence of each weight on the units it drives.

    The gradient has two parts: the exact gradient within a step, and the gradient through the old
    states, which is a learning signal for these states times their traces.

    Wang et al., Model-agnostic linear-memory online learning in spiking neural networks, 2026
    (doi:10.1038/s41467-026-68453-w); with the diagonal of the matrices from state to state it would
    be the SnAp-1 of Menick et al., 2020 (arXiv:2006.07232).

    Args:
        step: A pure function `step(params, state, *inputs) -> (state, out)`.
        loss: A function `loss(out, target)` that returns one real number.
        signal: The learning signal. `"new"` is the gradient with respect to the new states, pulled
            back through each unit itself, as in the paper; `"old"` is the gradient with respect to
            the old states, pulled back through the whole step, including the matrices from state to
            state. `"old"` costs no more, is exact whenever `"new"` is, and is closer to the true
            gradient otherwise.
        indirect: The treatment of parameters that drive many units: `"trace"`, `"instant"` or
            `"refuse"`; see `tapax.hidden.online`.

    Returns:
        An `OnlineRule`.

    Raises:
        HiddenError: If `step` or `loss` is not a function, or `signal` or `indirect` is not one of
            the choices. `init` and `update` raise it if their arguments do not fit the step.

    Example:
        >>> import jax.numpy as jnp
        >>> from tapax.hidden import online
        >>> step = lambda w, h, x: (0.5 * h + w * x, h)  # units act on themselves alone
        >>> loss = lambda out, target: jnp.sum((out - target) ** 2)
        >>> rule, w, h = online.d_rtrl(step, loss), jnp.array([1.0, 2.0]), jnp.zeros(2)
        >>> memory = rule.init(w, h, jnp.zeros(2))
        >>> for x in jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]):
        ...     learned, memory = rule.update(memory, w, x, target=0.0)
        >>> learned.grads.tolist()  # the loss is h**2, with h = (w[0] / 2, w[1])
        [0.5, 4.0]
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
    """Pull the signal back to the old states, through the units themselves and directly."""
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
