"""The pass of an equation: forward if it computes a value of the user's function, else backward.

A name stack does not tell the two apart. The rule of a derivative also computes the value of the
function: that of `jnp.linalg.cholesky` factorises the matrix. JAX moves equations out of loops and
drops their names, and remat recomputes the forward pass amid the backward pass. So this file
follows the results of the equation in a program with every operation marked, in which the values
of the forward pass end at value taps, and derivatives at other taps or transposed equations.
"""

from collections.abc import Iterable
from typing import Any

from tapax import _jax
from tapax._jax import Equation, Jaxpr
from tapax._jaxpr.bodies import bodies, list_distinct_equations
from tapax._jaxpr.dataflow import ForwardAnalysis
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._marks.tap import tap_p
from tapax.nonfinite._equation_numbers import called_body

_FORWARD_TAPS = ("value", "copy", "recomputed")


def is_differentiated(jaxpr: Jaxpr) -> bool:
    """Return whether a program contains a derivative."""
    return any("jvp" in _jax.transforms_of(eqn) for eqn in list_distinct_equations(jaxpr))


def is_marked(eqn: Equation, jaxpr: Jaxpr) -> bool:
    """Return whether a value tap of the body `jaxpr` marks a result of an equation."""
    return any(
        tap.primitive is tap_p
        and tap.params["kind"] in _FORWARD_TAPS
        and tap.invars[0] in eqn.outvars
        for tap in _jax.open_jaxpr(jaxpr).eqns
    )


class ResultFlow(ForwardAnalysis[bool]):
    """The flow of the results of one equation through a program with every operation marked.

    Attributes:
        is_value: True if a value of the forward pass depends on the results before any derivative.
        is_result: True if a result of the program depends on them.
        is_slope: True if a derivative depends on the results before any value.
    """

    nothing = False

    def __init__(self, jaxpr: Jaxpr, eqn: Equation):
        self.is_value = self.is_slope = False
        self._eqn, self._derivatives = eqn, 0
        self._around = _equations_around(jaxpr, eqn)
        levels = [
            e.params["level"]
            for e in list_distinct_equations(jaxpr)
            if e.primitive is tap_p and e.params["kind"] in _FORWARD_TAPS
        ]
        self._most = max(levels, default=0)
        self.is_result = any(self.run(jaxpr, [False] * len(_jax.open_jaxpr(jaxpr).invars)))

    def join(self, facts: Iterable[bool]) -> bool:
        return any(facts)

    def transfer(self, eqn: Equation, facts: list[bool]) -> list[bool]:
        return [any(facts) or id(eqn) in self._around] * len(eqn.outvars)

    def _apply(self, number: int, eqn: Equation, facts: list[bool]) -> list[bool]:
        del number
        if eqn is self._eqn:
            return [True] * len(eqn.outvars)
        if not any(facts) and id(eqn) not in self._around:
            return [False] * len(eqn.outvars)
        if eqn.primitive is tap_p:
            return self._tap(eqn, facts[0])
        if "transpose" not in _jax.transforms_of(eqn):
            return self._follow_within(eqn, facts)
        self.is_slope |= any(facts)
        if id(eqn) in self._around:
            # The equation may recompute a value of the forward pass in the body of a remat.
            self._follow_within(eqn, [False] * len(facts))
        return [False] * len(eqn.outvars)

    def _follow_within(self, eqn: Equation, facts: list[bool]) -> list[bool]:
        count = len(_jax.passes_of(eqn))
        self._derivatives += count
        outs = self._follow(eqn, facts)
        self._derivatives -= count
        return outs

    def _follow(self, eqn: Equation, facts: list[bool]) -> list[bool]:
        called = called_body(eqn, facts)
        if called is not None:
            return self.run(*called)
        if kind_of(eqn) & Kind.SHARD_MAP:
            return self.run(_jax.call_body(eqn), facts)
        return super()._follow(eqn, facts)

    def _tap(self, eqn: Equation, fact: bool) -> list[bool]:
        rest = [False] * (len(eqn.outvars) - 1)
        if eqn.params["kind"] not in _FORWARD_TAPS:
            self.is_slope |= fact
            return [False, *rest]
        # Name stacks may count a derivative twice, but no level exceeds the number of derivatives.
        around = min(self._derivatives + len(_jax.passes_of(eqn)), self._most)
        if eqn.params["level"] < around:
            # The value is not differentiated: it is constant, or part of a custom rule.
            return [fact, *rest]
        self.is_value |= fact
        return [False, *rest]


def _equations_around(jaxpr: Jaxpr, target: Equation) -> set[int]:
    """Return the ids of the equations whose bodies contain an equation."""
    found: set[int] = set()
    known: dict[int, tuple[Any, bool]] = {}  # with each body, so that no other takes its id

    def contains(program: Any) -> bool:
        opened = _jax.open_jaxpr(program)
        if id(opened) not in known:
            inside = any(eqn is target for eqn in opened.eqns)
            for eqn in opened.eqns:
                # The equation may be in several bodies, so search all of them.
                within = [contains(body) for body in bodies(eqn)]
                if any(within):
                    found.add(id(eqn))
                    inside = True
            known[id(opened)] = opened, inside
        return known[id(opened)][1]

    contains(jaxpr)
    return found
