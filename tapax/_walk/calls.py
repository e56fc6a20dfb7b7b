"""Calls of sites: the call of each value, and the possible calls of each residual.

A gradient or a recomputed value belongs to a call that the walk has met before. Its `Token` tells
which: see `_marks.tap`.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tapax._jax import Equation, Value
from tapax._marks.tap import Mark
from tapax._marks.turns import Turns
from tapax._sites import ScannedLayers, Site


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One execution of a mark in the program: the `number`th of its path, in some branches.

    `layers` are the scanned layers around it.
    """

    mark: Mark
    number: int
    branches: tuple[int, ...]
    layers: tuple[ScannedLayers, ...]

    @property
    def name(self) -> str:
        """The name of the site for this call."""
        return Site(self.mark.path, call=self.number).name


@dataclasses.dataclass(frozen=True)
class Token:
    """The calls from which a residual without elements may come."""

    calls: frozenset[Call]
    array: Any = None


class Calls:
    """The calls that a walk has met so far."""

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
        turns: Turns,
    ) -> Call:
        """Return the call of a `value` tap, which is a new call outside of eager loops."""
        number = self._numbers[mark.path] + turns.shift(mark.path, eqn.params["turns"])
        self._numbers[mark.path] += 1
        branches = (*branches, *eqn.params["branches"])
        known = self._known.get((mark.path, number))
        if known is not None and known.branches == branches:
            return known  # another iteration of a loop that runs eagerly
        call = self._known[mark.path, number] = Call(mark, number, branches, layers)
        self._by_uid.setdefault(mark.uid, []).append(call)
        self.all.append(call)
        return call

    def of(self, mark: Mark) -> list[Call]:
        """Return the calls of a mark; a body that is traced once may be called many times."""
        return self._by_uid.get(mark.uid, [])

    def first(self, path: str) -> Call:
        return self._known[path, 0]

    def possible_calls(
        self, token: Value, eqn: Equation, branches: tuple[int, ...] | None = None
    ) -> list[Call]:
        """Return the calls to which a token may belong; with `branches`, only calls in these."""
        mark = eqn.params["mark"]
        calls = list(token.calls) if type(token) is Token else self.of(mark)
        calls = [c for c in calls if c.mark.uid == mark.uid]
        return calls if branches is None else self.narrowed(calls, eqn, branches)

    def narrowed(
        self, calls: Sequence[Call], eqn: Equation, branches: tuple[int, ...]
    ) -> list[Call]:
        """Return the calls in the branches of an equation, or all calls if none is there.

        The residuals of different branches share the results of the conditional.
        """
        here = (*branches, *eqn.params["branches"])
        inside = [c for c in calls if c.branches == here] if len(calls) > 1 else []
        return inside or list(calls)

    def pullback(self, call: Call, *, recomputed: bool) -> int:
        """Number the gradients of a call; that of a `recomputed` value is not a new one."""
        number = self._pullbacks[call]
        self._pullbacks[call] += not recomputed
        return number

    def numbers(self) -> Any:
        """Return the numbers of calls and gradients so far, for `rewind`."""
        return Counter(self._numbers), Counter(self._pullbacks)

    def rewind(self, numbers: Any) -> None:
        """Reset the numbers of calls and gradients."""
        self._numbers, self._pullbacks = map(Counter, numbers)
