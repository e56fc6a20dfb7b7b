"""Dependences of the results of a program on its inputs: by units, by mixing, or in other ways.

A *mixing* operation, a product with a matrix or a convolution, combines the units of a network. The
effect of one state on another without mixing is its dynamics: a leak, a gate, a reset.

>>> import jax, jax.numpy as jnp
>>> def step(h, c, w):
...     c = 0.9 * c + jnp.tanh(w @ h)
...     return jnp.tanh(c), c
>>> program = jax.make_jaxpr(step)(jnp.zeros(3), jnp.zeros(3), jnp.zeros((3, 3)))
>>> for found in find_connections(program, {0: "h", 1: "c"}):
...     print(sorted((name, how.name) for name, how in found))
[('c', 'UNITS'), ('h', 'MIXING')]
[('c', 'UNITS'), ('h', 'MIXING')]
"""

import enum
from collections.abc import Iterable, Mapping
from typing import Any

from tapax import _jax
from tapax._jax import Equation, Jaxpr
from tapax._jaxpr.dataflow import ForwardAnalysis
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._marks.tap import tap_p


class Dependence(enum.IntEnum):
    """A way in which a value depends on an input: unit by unit, by mixing, or in another way."""

    UNITS = 1
    OTHER = 2
    MIXING = 3


Dependences = frozenset[tuple[Any, Dependence]]
"""The inputs on which a value depends, each with the ways in which it does."""

NOTHING: Dependences = frozenset()


class _ConnectionAnalysis(ForwardAnalysis[Dependences]):
    """An analysis that follows the named inputs of a program to its results."""

    nothing = NOTHING

    def join(self, facts: Iterable[Dependences]) -> Dependences:
        return NOTHING.union(*facts)

    def transfer(self, eqn: Equation, facts: list[Dependences]) -> list[Dependences]:
        kind = kind_of(eqn)
        if kind & Kind.COPY:
            return facts
        everything = self.join(facts)
        shapes = {v.aval.shape for v, found in zip(eqn.invars, facts, strict=True) if found}
        if kind & Kind.MATRIX_PRODUCT:
            everything = _at_least(everything, Dependence.MIXING)
        elif eqn.primitive is tap_p:
            return [facts[0], *(NOTHING for _ in eqn.outvars[1:])]
        elif not (kind & Kind.ELEMENTWISE and shapes == {eqn.outvars[0].aval.shape}):
            everything = _at_least(everything, Dependence.OTHER)
        return [everything] * len(eqn.outvars)

    def follow(self, eqn: Equation, facts: list[Dependences]) -> list[Dependences]:
        """Follow the inputs of an equation to its results, through its body, too."""
        return self._apply(0, eqn, facts)

    def decide(self, fact: Dependences) -> Dependences:
        return _at_least(fact, Dependence.OTHER)

    def slice(self, fact: Dependences) -> Dependences:
        return _at_least(fact, Dependence.OTHER)


def find_connections(jaxpr: Jaxpr, inputs: Mapping[int, Any]) -> list[Dependences]:
    """Find on which of the named `inputs` each result of a program depends, and how."""
    count = len(_jax.open_jaxpr(jaxpr).invars)
    seeds = [
        frozenset({(inputs[i], Dependence.UNITS)}) if i in inputs else NOTHING for i in range(count)
    ]
    return _ConnectionAnalysis().run(jaxpr, seeds)


def is_mixing(eqn: Equation, positions: Iterable[int]) -> bool:
    """Return whether a result depends by mixing on an operand at one of `positions`."""
    chosen = frozenset(positions)
    units = frozenset({(0, Dependence.UNITS)})
    facts = [units if i in chosen else NOTHING for i in range(len(eqn.invars))]
    results = _ConnectionAnalysis().follow(eqn, facts)
    return any((0, Dependence.MIXING) in result for result in results)


def _at_least(found: Dependences, how: Dependence) -> Dependences:
    return frozenset((name, max(was, how)) for name, was in found)
