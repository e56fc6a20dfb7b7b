"""The order of calls in the branches of mapped conditionals.

Under `vmap` the branches of a conditional run one after the other, and `lax.cond` puts the branch
for true second, although it was written first. So each tap in these branches has a `Turn` for every
such conditional around it, and the numbers of its calls are corrected by the calls of the same site
in the other branch.

The correction is not known when JAX maps a conditional: only in the whole program do the scopes of
a mark tell its path.
"""

import dataclasses
import itertools
from collections import defaultdict

from tapax import _jax
from tapax._jax import Jaxpr
from tapax._jaxpr.bodies import bodies
from tapax._marks.scopes import Scopes, scopes_of
from tapax._marks.tap import tap_effect, tap_p

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Turn:
    """One tap in a branch of a mapped conditional that runs before a branch written first."""

    conditional: int
    runs_first: bool
    tap: int


@dataclasses.dataclass
class Branch:
    """A branch of a mapped conditional, which numbers its taps."""

    conditional: int
    runs_first: bool
    taps: int = 0

    def turn(self) -> Turn:
        """Return the turn of the next tap."""
        self.taps += 1
        return Turn(self.conditional, self.runs_first, self.taps)


def branches_in_turn() -> tuple[Branch, Branch]:
    """Return the two branches of a conditional in the order in which they run."""
    conditional = next(_numbers)
    return Branch(conditional, runs_first=True), Branch(conditional, runs_first=False)


class Turns:
    """The corrections of the numbers of calls in a program."""

    def __init__(self, program: Jaxpr) -> None:
        self._program = program
        self._taps: dict[tuple[int, bool, str], set[int]] | None = None

    def shift(self, path: str, turns: tuple[Turn, ...]) -> int:
        """Return what to add to the number of a call, which counts calls as they run."""
        return sum(self._calls_in_other_branch(path, turn) for turn in turns)

    def _calls_in_other_branch(self, path: str, turn: Turn) -> int:
        if self._taps is None:
            self._taps = defaultdict(set)
            self._find(self._program, ())
        # A body may be called several times, so count the taps and not the times that they occur.
        count = len(self._taps.get((turn.conditional, not turn.runs_first, path), ()))
        return count if turn.runs_first else -count

    def _find(self, jaxpr: Jaxpr, scopes: Scopes) -> None:
        assert self._taps is not None
        for eqn in _jax.open_jaxpr(jaxpr).eqns:
            here = scopes_of(eqn, scopes)
            if eqn.primitive is tap_p and eqn.params["kind"] == "value":
                path = eqn.params["mark"].within(here).path
                for turn in eqn.params["turns"]:
                    self._taps[turn.conditional, turn.runs_first, path].add(turn.tap)
            elif tap_effect in eqn.effects:
                for body in bodies(eqn):
                    self._find(body, here)
