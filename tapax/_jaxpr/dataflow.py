"""Analyses that follow values through a program and through the bodies of its equations."""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from tapax import _jax
from tapax._jax import Equation, Jaxpr, Var
from tapax._jaxpr.bodies import implementation
from tapax._jaxpr.evaluate import evaluate_equations, read
from tapax._jaxpr.kinds import CALLS, CUSTOM_RULES, Kind, kind_of

Fact = TypeVar("Fact")


class ForwardAnalysis(Generic[Fact]):
    """An analysis that computes a fact for each result of a program from facts for the inputs.

    Facts only grow, so the analysis iterates a loop until the facts for its carry stop changing.
    """

    nothing: Fact
    """The fact for literals and constants."""

    def join(self, facts: Iterable[Fact]) -> Fact:
        """Combine the facts for several values into one for a value that may be any of them."""
        raise NotImplementedError

    def transfer(self, eqn: Equation, facts: list[Fact]) -> list[Fact]:
        """Compute the facts for the results of an equation without a body to analyse."""
        raise NotImplementedError

    def decide(self, fact: Fact) -> Fact:
        """Compute the fact that a predicate adds to the values that it chooses."""
        return fact

    def slice(self, fact: Fact) -> Fact:
        """Compute the fact for one slice from the fact for the stacked value, or the reverse."""
        return fact

    def carry(self, fact: Fact) -> Fact:
        """Compute the fact that a loop carries to its next iteration."""
        return fact

    def run(self, jaxpr: Jaxpr, facts: Sequence[Fact]) -> list[Fact]:
        """Compute the facts for the results of a program."""
        inner = _jax.open_jaxpr(jaxpr)
        env = dict.fromkeys(inner.constvars, self.nothing)
        env.update(zip(inner.invars, facts, strict=True))
        evaluate_equations(inner.eqns, env, self._apply, self._literal)
        return [read(env, v, self._literal) for v in inner.outvars]

    def _literal(self, literal: object) -> Fact:
        del literal
        return self.nothing

    def _apply(self, number: int, eqn: Equation, facts: list[Fact]) -> list[Fact]:
        del number
        if all(fact == self.nothing for fact in facts):
            return [self.nothing for _ in eqn.outvars]
        return self._follow(eqn, facts)

    def _follow(self, eqn: Equation, facts: list[Fact]) -> list[Fact]:
        kind = kind_of(eqn)
        if kind & (CALLS | CUSTOM_RULES | Kind.REMAT):
            return self.run(_jax.call_body(eqn), facts)
        if kind & Kind.COND:
            return self._cond(eqn, facts)
        if kind & Kind.SCAN:
            return self._scan(eqn, facts)
        if kind & Kind.WHILE:
            return self._while(eqn, facts)
        body = implementation(eqn)
        return self.transfer(eqn, facts) if body is None else self.run(body, facts)

    def _cond(self, eqn: Equation, facts: list[Fact]) -> list[Fact]:
        index, *operands = facts
        chosen = self.decide(index)
        found = (self.run(branch, operands) for branch in eqn.params["branches"])
        return [self.join([chosen, *outs]) for outs in zip(*found, strict=True)]

    def _scan(self, eqn: Equation, facts: list[Fact]) -> list[Fact]:
        nconsts, ncarry = _jax.scan_split(eqn.params)
        consts, carry = facts[:nconsts], facts[nconsts : nconsts + ncarry]
        xs = [self.slice(fact) for fact in facts[nconsts + ncarry :]]
        while True:
            outs = self.run(eqn.params["jaxpr"], [*consts, *carry, *xs])
            carried = map(self.carry, outs[:ncarry])
            grown = [self.join(pair) for pair in zip(carry, carried, strict=True)]
            if grown == carry:
                last = outs[:ncarry] if eqn.params["length"] else carry
                return [*last, *(self.slice(fact) for fact in outs[ncarry:])]
            carry = grown

    def _while(self, eqn: Equation, facts: list[Fact]) -> list[Fact]:
        ntest, nbody = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test_consts, body_consts = facts[:ntest], facts[ntest : ntest + nbody]
        carry = facts[ntest + nbody :]
        while True:
            outs = self.run(eqn.params["body_jaxpr"], [*body_consts, *carry])
            (goes_on,) = self.run(eqn.params["cond_jaxpr"], [*test_consts, *carry])
            ended = self.decide(goes_on)
            carried = zip(carry, map(self.carry, outs), strict=True)
            grown = [self.join([*pair, ended]) for pair in carried]
            if grown == carry:
                return carry
            carry = grown


def computed_from(eqns: Iterable[Equation], variables: Iterable[Var]) -> set[Var]:
    """Return `variables` and all variables that `eqns` compute from them."""
    found = set(variables)
    for eqn in eqns:
        if any(not isinstance(v, _jax.Literal) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found
