"""Loops that run a second time in the backward pass, to recompute values that were not kept.

A library may differentiate a while loop by a custom rule: the first loop keeps the states of a few
iterations. The backward loop starts from these states, recomputes the other iterations, and
differentiates each iteration, the last one first. Its body contains the marks of the first loop,
but these are not new calls of a site. The gradients in the backward loop belong to the calls of the
first loop, at the iteration that the backward loop has reached.

tapax identifies such loops by the names that their library gives them.
"""

from __future__ import annotations

import dataclasses

from tapax import _jax
from tapax._jax import Equation


@dataclasses.dataclass(frozen=True)
class ReplayedLoop:
    """The names of a first loop and its backward loop, and positions in their carries.

    `count` is the position at which the first loop counts its iterations, and `left` the position
    at which the backward loop takes that count. `iteration` is the position at which the backward
    loop has the number of the iteration that its body computes.
    """

    first: str
    backward: str
    count: int
    left: int
    iteration: int


_LOOPS = (
    # `equinox.internal.while_loop(kind="checkpointed")`, and so diffrax's default adjoint.
    ReplayedLoop("checkpointed-fwd", "checkpointed-bwd", count=0, left=1, iteration=0),
)
FIRST = {loop.first: loop for loop in _LOOPS}
BACKWARD = {loop.backward: loop for loop in _LOOPS}


def find_loop(eqn: Equation, loops: dict[str, ReplayedLoop]) -> ReplayedLoop | None:
    """Return the loop whose name is the innermost name around an equation, if any."""
    *_, innermost = ("", *_jax.names_of(eqn))
    return loops.get(innermost)
