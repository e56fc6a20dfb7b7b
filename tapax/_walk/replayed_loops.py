"""Loops that run a second time in the backward pass, to compute once more what was not kept.

A library may differentiate a while loop by a rule of its own: the first loop keeps the states of a
few iterations, the backward loop starts from those, computes the others again, and takes each
iteration back when it gets there, the last one first. Its body marks what the first loop marked.
That is no new call of a site; and the gradients that it leaves are those of the first loop's calls,
each of the iteration that the backward loop has got to.

Such loops are known by the names that their library gives them.
"""

from __future__ import annotations

import dataclasses

from tapax import _jax
from tapax._jax import Equation


@dataclasses.dataclass(frozen=True)
class ReplayedLoop:
    """A first loop and its backward loop, by name, and what is at which place of their carries.

    `count` is where the first loop counts its iterations, and `left` where the backward loop is
    given that count. `iteration` is where the backward loop has the number of the iteration that
    its body computes.
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
    """Returns the loop whose name is the innermost around an equation, if there is one."""
    *_, innermost = ("", *_jax.names_of(eqn))
    return loops.get(innermost)
