"""What the backward passes of a program read: the values that it keeps for them.

A program that takes gradients has the equations of the forward pass and, after them, those of the
backward pass. Every value that the first computes and the second reads is kept in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tapax import _jax
from tapax._jax import Atom, Equation, Jaxpr
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.producers import Body


@dataclasses.dataclass(frozen=True)
class BackwardRead:
    """A value that a backward pass reads, in the body where it does.

    It is `given` if the differentiated function did not compute it but was given it.
    """

    body: Body
    atom: Atom
    given: bool


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The derivatives that an equation is part of, and the number of the outermost one.

    The number of an equation that is part of none is that of the last gradient begun before it.
    """

    backward: tuple[bool, ...]
    gradient: int


_BEFORE = _Passes((), -1)
"""For what a body is given: it is there before any gradient."""


def takes_gradient(jaxpr: Jaxpr) -> bool:
    """Whether a program has a backward pass."""
    return _GradientBodies().holds(jaxpr)


class _GradientBodies:
    """Which programs have backward passes. Each is looked at once, however often it is called."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bool]] = {}

    def holds(self, jaxpr: Jaxpr) -> bool:
        inner = _jax.open_jaxpr(jaxpr)
        if id(inner) not in self._known:
            found = any(
                any(_jax.passes_of(eqn)) or any(map(self.holds, bodies(eqn))) for eqn in inner.eqns
            )
            # The jaxpr is kept so that its id stays its own.
            self._known[id(inner)] = inner, found
        return self._known[id(inner)][1]


def backward_reads(body: Body) -> Iterator[BackwardRead]:
    """Lists what the backward passes of a program read of their forward passes.

    A value that several equations read is listed once, or twice if one gradient was given it and
    another one computed it.
    """
    return _reads_in(body, _GradientBodies())


def _reads_in(body: Body, gradients: _GradientBodies) -> Iterator[BackwardRead]:
    passes = _number_gradients(body.jaxpr.eqns)
    made = {v: passes[id(eqn)] for eqn in body.jaxpr.eqns for v in eqn.outvars}
    seen: set[tuple[int, bool]] = set()
    for eqn in body.jaxpr.eqns:
        reader = passes[id(eqn)]
        if not any(reader.backward):
            for inside in filter(gradients.holds, bodies(eqn)):
                yield from _reads_in(body.child(eqn, inside, entered=False), gradients)
            continue
        for atom in eqn.invars:
            if isinstance(atom, _jax.Literal):
                continue
            given = _is_given(reader, made.get(atom, _BEFORE))
            if given is not None and (id(atom), given) not in seen:
                seen.add((id(atom), given))
                yield BackwardRead(body, atom, given)


def _number_gradients(eqns: list[Equation]) -> dict[int, _Passes]:
    """Numbers the gradients that are taken one after the other."""
    found: dict[int, _Passes] = {}
    gradient, was_backward = -1, True
    for eqn in eqns:
        backward = _jax.passes_of(eqn)
        if backward:
            gradient += was_backward and not backward[0]
            was_backward = backward[0]
        found[id(eqn)] = _Passes(backward, gradient)
    return found


def _is_given(reader: _Passes, maker: _Passes) -> bool | None:
    """Whether a backward pass reads what was given; None if nothing had to be kept for it.

    What is computed after the forward pass began, but not by it, is the cotangent of the results.
    """
    same = maker.gradient == reader.gradient
    if same and not maker.backward:
        return None
    backward = maker.backward if same else ()
    found = [
        depth >= len(backward)
        for depth, is_backward in enumerate(reader.backward)
        if is_backward and not (depth < len(backward) and backward[depth])
    ]
    return min(found) if found else None
