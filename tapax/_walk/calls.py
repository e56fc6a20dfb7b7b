"""Calls of sites: which one a value is, and which ones a residual may belong to.

A gradient, and a value that is computed once more, are those of a call that was walked before. They
are told by the `Token` that goes with them: see `_marks.tap`.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tapax._jax import Equation, Value
from tapax._marks.tap import Mark
from tapax._sites import ScannedLayers, Site


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One execution of a mark in the program: the `number`th of its path, in some branch.

    `layers` are the scanned layers that it is in.
    """

    mark: Mark
    number: int
    branches: tuple[int, ...]
    layers: tuple[ScannedLayers, ...]

    @property
    def name(self) -> str:
        """The name of the site that it is."""
        return Site(self.mark.path, call=self.number).name


@dataclasses.dataclass(frozen=True)
class Token:
    """Which calls a residual without elements may have come from."""

    calls: frozenset[Call]
    array: Any = None


class Calls:
    """The calls that a walk has come across."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._pullbacks: Counter[Call] = Counter()
        self._known: dict[tuple[str, int], Call] = {}
        self._by_uid: dict[int, list[Call]] = {}
        self.all: list[Call] = []

    def new(
        self,
        mark: Mark,
        eqn: Equation,
        branches: tuple[int, ...],
        layers: tuple[ScannedLayers, ...],
    ) -> Call:
        """The call that a tap of a mark is."""
        number = self._numbers[mark.path] + eqn.params["shift"]
        self._numbers[mark.path] += 1
        branches = (*branches, *eqn.params["branches"])
        known = self._known.get((mark.path, number))
        if known is not None and known.branches == branches:
            return known  # another iteration of a loop that is evaluated
        call = self._known[mark.path, number] = Call(mark, number, branches, layers)
        self._by_uid.setdefault(mark.uid, []).append(call)
        self.all.append(call)
        return call

    def of(self, mark: Mark) -> list[Call]:
        """The calls of a mark: a body that is traced once may be called many times."""
        return self._by_uid.get(mark.uid, [])

    def first(self, path: str) -> Call:
        return self._known[path, 0]

    def standing_for(
        self, token: Value, eqn: Equation, branches: tuple[int, ...] | None = None
    ) -> list[Call]:
        """The calls that a residual may belong to; if it is read in branches, those in them."""
        mark = eqn.params["mark"]
        calls = list(token.calls) if type(token) is Token else self.of(mark)
        calls = [c for c in calls if c.mark.uid == mark.uid]
        return calls if branches is None else self.narrowed(calls, eqn, branches)

    def narrowed(
        self, calls: Sequence[Call], eqn: Equation, branches: tuple[int, ...]
    ) -> list[Call]:
        """Of some calls, those in the branches that an equation is in, if there are any.

        Residuals of branches share their places.
        """
        here = (*branches, *eqn.params["branches"])
        inside = [c for c in calls if c.branches == here] if len(calls) > 1 else []
        return inside or list(calls)

    def pullback(self, call: Call, *, again: bool) -> int:
        """The number of a gradient of a call; that of a value computed `again` is no new one."""
        number = self._pullbacks[call]
        self._pullbacks[call] += not again
        return number

    def numbers(self) -> Any:
        """How many calls and gradients there have been."""
        return Counter(self._numbers), Counter(self._pullbacks)

    def rewind(self, numbers: Any) -> None:
        """Goes back to where there were as many."""
        self._numbers, self._pullbacks = map(Counter, numbers)
