"""The origins of arrays: the operands that equations return, or pass to their bodies.

An operand that a function returns unchanged is a result of every equation that calls the function.
`nnx.remat`, `nnx.jit` and `nnx.cond` return all Variables of a module in that way, so the second
call of the module takes results of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapax import _jax
from tapax._jax import Equation, Jaxpr, OpenJaxpr
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.kinds import CALLS, CUSTOM_RULES, Kind, kind_of
from tapax._marks.tap import tap_p

_PASSING = Kind.REARRANGEMENT | Kind.SELECTION
"""The kinds of primitives whose first result counts as the first operand."""
_KEEPING = frozenset({"convert_element_type", "stop_gradient"})
"""Further such primitives, of kinds in which others change their operand."""
_CALLED = CALLS | CUSTOM_RULES | Kind.REMAT | Kind.SHARD_MAP
"""Equations whose operands and results are those of their first body."""


class PassedOperands:
    """The operands that equations return as results.

    It examines each body once, however many equations share the body.
    """

    def __init__(self) -> None:
        self._inputs: dict[int, tuple[OpenJaxpr, list[int | None]]] = {}

    def find(self, eqn: Equation) -> dict[int, int]:
        """Map the number of each result that is an operand to the number of that operand."""
        kind = kind_of(eqn)
        if kind & Kind.COPY:
            return {i: i for i in range(min(len(eqn.invars), len(eqn.outvars)))}
        if eqn.primitive is tap_p or kind & _PASSING or eqn.primitive.name in _KEEPING:
            return {0: 0}
        if kind & _CALLED:
            return self._through_call(eqn)
        if kind & Kind.COND:
            return self._through_branches(eqn)
        if kind & Kind.SCAN:
            return self._through_scan(eqn)
        return self._through_while(eqn) if kind & Kind.WHILE else {}

    def _through_call(self, eqn: Equation) -> dict[int, int]:
        body = bodies(eqn)[0]
        if len(_jax.open_jaxpr(body).invars) != len(eqn.invars):
            return {}
        return {i: n for i, n in enumerate(self._returned_inputs(body)) if n is not None}

    def _through_branches(self, eqn: Equation) -> dict[int, int]:
        branches = [self._returned_inputs(body) for body in bodies(eqn)]
        agreed = {i: {*inputs} for i, inputs in enumerate(zip(*branches, strict=True))}
        # The first operand of a conditional is its index.
        return {
            i: number + 1
            for i, numbers in agreed.items()
            if len(numbers) == 1 and (number := numbers.pop()) is not None
        }

    def _through_scan(self, eqn: Equation) -> dict[int, int]:
        consts, carry = _jax.scan_split(eqn.params)
        inputs = self._returned_inputs(bodies(eqn)[0])
        # An unchanged carry is its operand, and the stacked slices of an operand are the operand.
        return {
            i: number
            for i, number in enumerate(inputs)
            if number is not None
            and (number == consts + i if i < carry else number >= consts + carry)
        }

    def _through_while(self, eqn: Equation) -> dict[int, int]:
        consts, before = eqn.params["body_nconsts"], eqn.params["cond_nconsts"]
        inputs = self._returned_inputs(eqn.params["body_jaxpr"])
        return {i: before + n for i, n in enumerate(inputs) if n == consts + i}

    def _returned_inputs(self, body: Jaxpr) -> list[int | None]:
        """Return, for each result of a body, the number of the input that it is, or None."""
        inner = _jax.open_jaxpr(body)
        if id(inner) not in self._inputs:
            self._inputs[id(inner)] = inner, self._follow_results(inner)
        return self._inputs[id(inner)][1]

    def _follow_results(self, inner: OpenJaxpr) -> list[int | None]:
        inputs = {v: i for i, v in enumerate(inner.invars)}
        makers = {v: (eqn, i) for eqn in inner.eqns for i, v in enumerate(eqn.outvars)}
        passed: dict[int, dict[int, int]] = {}

        def follow(atom: Any) -> int | None:
            while not isinstance(atom, _jax.Literal) and atom in makers:
                eqn, i = makers[atom]
                if id(eqn) not in passed:
                    passed[id(eqn)] = self.find(eqn)
                if i not in passed[id(eqn)]:
                    return None
                atom = eqn.invars[passed[id(eqn)][i]]
            return None if isinstance(atom, _jax.Literal) else inputs.get(atom)

        return [follow(v) for v in inner.outvars]


def body_origins(eqn: Equation, body: Jaxpr, origins: Sequence[Any]) -> list[Any]:
    """Return the origins of the inputs of a body of an equation, or None for unknown ones.

    A carry has the origin of its initial value.
    """
    count = len(_jax.open_jaxpr(body).invars)
    if kind_of(eqn) is Kind.WHILE:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts = origins[:first] if body is eqn.params["cond_jaxpr"] else origins[first:][:second]
        return [*consts, *origins[first + second :]]
    if len(origins) == count:
        return [*origins]
    # The first operand of a conditional is its index.
    return [*origins[1:]] if len(origins) == count + 1 else [None] * count
