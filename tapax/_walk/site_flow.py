"""The flow of data between the sites of a traced program, without evaluating it.

The analysis follows the values of taps through the program. The fact of a variable is the set of
the taps whose values reached it last: a tap replaces the set by itself. Each tap has the name that
the walk gives it, so the analysis enters bodies in the order of the walk, and counts calls as the
walk does.

A gradient is the gradient of a site, so the tap of a gradient replaces the set, too. Values in a
backward pass count as gradients. A loop that trains a model carries gradients, as changes of the
parameters, from every site to every other. The analysis follows gradients, but not from one
iteration to the next.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator, Iterable

from tapax import _jax
from tapax._jax import Equation, Jaxpr
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.dataflow import ForwardAnalysis
from tapax._jaxpr.kinds import CALLS, CUSTOM_RULES, Kind, kind_of
from tapax._marks.marked_jaxprs import TappedBodies, is_of_two
from tapax._marks.scopes import Scopes, scopes_of
from tapax._marks.tap import Mark, split_shape, tap_effect, tap_p
from tapax._marks.turns import Turns
from tapax._results.flow import Flow, FlowSite, keep_last
from tapax._sites import Site
from tapax._walk.replayed_loops import BACKWARD, find_loop

_BODIES = CALLS | CUSTOM_RULES | Kind.REMAT | Kind.SHARD_MAP
_UNLISTED = ("param", "closed")
"""The kinds of marks that are not sites."""
_MORE = -1
"""The element of a set that has lost others because of the limit."""

Reached = frozenset[int]
"""The taps whose values reached a variable last: 2 * i for site i, 2 * i + 1 for its gradient."""


def find_flow(jaxpr: Jaxpr) -> Flow:
    """Find the flow of data between the sites of a program."""
    analysis = _FlowAnalysis(jaxpr)
    analysis.run(jaxpr, [analysis.nothing for _ in _jax.open_jaxpr(jaxpr).invars])
    return Flow(tuple(analysis.sites), tuple(sorted(analysis.edges)), frozenset(analysis.limited))


class _FlowAnalysis(ForwardAnalysis[Reached]):
    nothing = frozenset[int]()

    def __init__(self, program: Jaxpr) -> None:
        self.sites: list[FlowSite] = []
        self.edges: set[tuple[int, int]] = set()
        self.limited: set[int] = set()
        self._tapped = TappedBodies()
        self._calls: Counter[str] = Counter()
        self._turns = Turns(program)
        self._uids: set[int] = set()
        self._scopes: Scopes = ()
        self._recomputing = False
        # A loop is analysed several times. The position of a tap, the numbers of the equations
        # around it, tells that it is the same tap.
        self._place: tuple[int, ...] = ()
        self._numbers: dict[tuple[int, ...], int | None] = {}

    def join(self, facts: Iterable[Reached]) -> Reached:
        first, *others = facts
        joined = first.union(*(fact for fact in others if fact is not first))
        if joined is first or joined == first:
            return first
        kept, is_cut = keep_last(joined - {_MORE})
        return kept | {_MORE} if is_cut or _MORE in joined else kept

    def transfer(self, eqn: Equation, facts: list[Reached]) -> list[Reached]:
        is_paired = kind_of(eqn) & (Kind.COPY | Kind.PAIRED)
        if is_paired and len(facts) == len(eqn.outvars):
            return facts
        return [self.join(facts)] * len(eqn.outvars)

    def carry(self, fact: Reached) -> Reached:
        return frozenset(tap for tap in fact if tap % 2 == 0 or tap == _MORE)

    def _apply(self, number: int, eqn: Equation, facts: list[Reached]) -> list[Reached]:
        with self._at(number):
            if eqn.primitive is tap_p:
                return self._tap(eqn, facts)
            if not self._has_taps(eqn) and not any(facts):
                return [self.nothing for _ in eqn.outvars]
            found = self._follow(eqn, facts)
            return [*map(_as_gradients, found)] if any(_jax.passes_of(eqn)) else found

    def _has_taps(self, eqn: Equation) -> bool:
        return tap_effect in eqn.effects or any(map(self._tapped.has_taps, bodies(eqn)))

    def _follow(self, eqn: Equation, facts: list[Reached]) -> list[Reached]:
        kind = kind_of(eqn)
        outer = self._scopes, self._recomputing
        self._scopes = scopes_of(eqn, self._scopes)
        self._recomputing |= eqn.params.get("differentiated", False)
        try:
            if kind & _BODIES:
                return self.run(_jax.call_body(eqn), facts)
            if kind & Kind.COND:
                return self._cond(eqn, facts)
            if kind & Kind.SCAN:
                return self._scan(eqn, facts)
            if kind & Kind.WHILE:
                return self._while(eqn, facts)
            return self.transfer(eqn, facts)
        finally:
            self._scopes, self._recomputing = outer

    def _cond(self, eqn: Equation, facts: list[Reached]) -> list[Reached]:
        index, *operands = facts
        branches = eqn.params["branches"]
        order = (1, 0) if is_of_two(branches) else range(len(branches))
        found: dict[int, list[Reached]] = {}
        for i in order:
            with self._at(i):
                found[i] = self.run(branches[i], operands)
        return [self.join([*outs, index]) for outs in zip(*found.values(), strict=True)]

    def _while(self, eqn: Equation, facts: list[Reached]) -> list[Reached]:
        """Follow values through a loop; the values in its predicate only decide when it ends."""
        ntest, nbody = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test_consts, body_consts = facts[:ntest], facts[ntest : ntest + nbody]
        self._recomputing |= find_loop(eqn, BACKWARD) is not None
        carry = facts[ntest + nbody :]
        while True:
            with self._at(0):
                outs = self.run(eqn.params["body_jaxpr"], [*body_consts, *carry])
            carried = zip(carry, map(self.carry, outs), strict=True)
            grown = [self.join(pair) for pair in carried]
            if grown == carry:
                break
            carry = grown
        with self._at(1):
            self.run(eqn.params["cond_jaxpr"], [*test_consts, *carry])
        return [self.join(pair) for pair in zip(carry, outs, strict=True)]

    @contextlib.contextmanager
    def _at(self, number: int) -> Generator[None]:
        outer, self._place = self._place, (*self._place, number)
        try:
            yield
        finally:
            self._place = outer

    def _tap(self, eqn: Equation, facts: list[Reached]) -> list[Reached]:
        kind, mark, operand = eqn.params["kind"], eqn.params["mark"], facts[0]
        if kind.startswith("grad") and facts[1]:
            return [_as_gradients(facts[1])]  # the token tells the site
        if kind != "value":
            return [operand, *(self.nothing for _ in eqn.outvars[1:])]
        if self._place not in self._numbers:
            self._numbers[self._place] = self._number(eqn, mark)
        number = self._numbers[self._place]
        if number is None:
            return [operand, self.nothing]
        self.edges.update((tap // 2, number) for tap in operand if tap != _MORE)
        if _MORE in operand:
            self.limited.add(number)
        return [frozenset({2 * number})] * 2

    def _number(self, eqn: Equation, mark: Mark) -> int | None:
        """Register the site of a tap and return its number, or None if the tap has no new site."""
        if self._recomputing and mark.uid in self._uids:
            return None
        self._uids.add(mark.uid)
        mark = mark.within(scopes_of(eqn, self._scopes))
        call = self._calls[mark.path] + self._turns.shift(mark.path, eqn.params["turns"])
        self._calls[mark.path] += 1
        if mark.kind in _UNLISTED:
            return None
        name = mark.value_path if mark.reduce is not None else Site(mark.path, call=call).name
        mapped, shape = split_shape(eqn)
        dtype = str(eqn.invars[0].aval.dtype)
        self.sites.append(FlowSite(name, (*mapped, *shape), dtype))
        return len(self.sites) - 1


def _as_gradients(fact: Reached) -> Reached:
    return frozenset(tap | 1 if tap != _MORE else tap for tap in fact)
