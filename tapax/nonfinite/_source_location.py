"""The location of an equation for the user: its counterpart among marks, and its mapped axes.

A trace of the program with every operation marked tells what the jaxpr does not: each tap knows the
axes that `vmap` maps over.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tapax import _jax
from tapax._calling.source_lines import lines_outside_jax
from tapax._jax import Jaxpr
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._marks.tap import tap_p
from tapax._sites import Operation, Ops
from tapax.nonfinite._equation_numbers import NumberedEquation, frame_body, inlined_bodies


@dataclasses.dataclass(frozen=True)
class EveryOperation(Ops):
    """A selection that marks the results of every operation."""

    names: tuple[str, ...] = ()

    def marks(self, operation: Operation) -> bool:
        return True


def transformations(equations: Sequence[NumberedEquation]) -> set[str]:
    """Return the transformations that made some equations: `jvp`, `transpose`, `vmap`."""
    return {name for equation in equations for name in _jax.transforms_of(equation.eqn)}


def counterpart(jaxpr: Jaxpr, equation: NumberedEquation, marked: Any) -> NumberedEquation | None:
    """Find the equation of `jaxpr` in `marked`, the program with other marks; None if not found.

    Its operation, type and line identify the equation; if several equations share these, so does
    their order. Numbers do not agree between the programs: marks may add to the carry of a loop.
    """
    own = [s for s in _all_equations(jaxpr) if _is_alike(s, equation)]
    turn = next((i for i, s in enumerate(own) if s.eqn is equation.eqn), 0)
    there = [s for s in _all_equations(marked) if _is_alike(s, equation)]
    return there[min(turn, len(there) - 1)] if there else None


def _all_equations(jaxpr: Jaxpr) -> Iterator[NumberedEquation]:
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield NumberedEquation(eqn, 0, 0, (), jaxpr)
        for body in (*inlined_bodies(eqn), frame_body(eqn)):
            if body is not None:
                yield from _all_equations(body)


def _is_alike(a: NumberedEquation, b: NumberedEquation) -> bool:
    first, second = a.eqn, b.eqn
    if first.primitive is not second.primitive or len(first.outvars) != len(second.outvars):
        return False
    pairs = zip(first.outvars, second.outvars, strict=True)
    if any(v.aval.shape != w.aval.shape or v.aval.dtype != w.aval.dtype for v, w in pairs):
        return False
    alike = lines_outside_jax(first) == lines_outside_jax(second)
    return alike and transformations([a]) == transformations([b])


def mapped_axes(equation: NumberedEquation, result: int, hops: int = 8) -> tuple[int, ...]:
    """Return the axes of a result over which `vmap` maps, outermost first; empty if unknown.

    They are the mapped axes of the nearest tap, at most `hops` equations away. The path to it leads
    through equations whose operands and results have one shape, which leave the axes in place.
    """
    eqns = _jax.open_jaxpr(equation.jaxpr).eqns
    target = equation.eqn.outvars[result]
    shape = target.aval.shape
    taps = {}
    for eqn in eqns:
        if eqn.primitive is tap_p:
            for v in (eqn.invars[0], eqn.outvars[0]):
                if not isinstance(v, _jax.Literal):
                    taps.setdefault(v, eqn.params["axes"])
    near: dict[Any, list[Any]] = {}
    for eqn in eqns:
        alike = [
            v
            for v in (*eqn.invars, *eqn.outvars)
            if not isinstance(v, _jax.Literal) and getattr(v.aval, "shape", None) == shape
        ]
        if not kind_of(eqn) & _MOVING:
            for v in alike:
                near.setdefault(v, []).extend(alike)
    front, seen = [target], {target}
    for _ in range(hops):
        for v in front:
            if v in taps:
                return taps[v]
        front = [w for v in front for w in near.get(v, ()) if w not in seen]
        seen.update(front)
    return ()


_MOVING = Kind.REARRANGEMENT | Kind.SELECTION | Kind.MATRIX_PRODUCT


class ArgumentArray(NamedTuple):
    """An array among the arguments: its keys in the call, and the array searched in its place."""

    keys: Any
    array: Any
    searched: Any
