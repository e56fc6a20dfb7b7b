"""The residuals of a program: values of the forward pass that backward passes read.

In a program that takes gradients, the equations of the backward pass follow those of the forward
pass. The program keeps every value that the forward pass computes and the backward pass reads.
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
    """A value that a backward pass reads, in the body that reads it.

    `given` is true if the value is an input of the differentiated function, which did not
    compute it.
    """

    body: Body
    atom: Atom
    given: bool


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The derivatives that contain an equation, and the number of the outermost gradient.

    For each derivative, `backward` says whether the equation is in its backward pass. An equation
    outside of all derivatives has the number of the last gradient that began before it.
    """

    backward: tuple[bool, ...]
    gradient: int


_BEFORE = _Passes((), -1)
"""The passes of an input of a body, which exists before any gradient."""


def takes_gradient(jaxpr: Jaxpr) -> bool:
    """Return whether a program has a backward pass."""
    return _GradientBodies().has_gradient(jaxpr)


class _GradientBodies:
    """A cache of which programs have backward passes: each is searched once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bool]] = {}

    def has_gradient(self, jaxpr: Jaxpr) -> bool:
        inner = _jax.open_jaxpr(jaxpr)
        if id(inner) not in self._known:
            found = any(
                any(_jax.passes_of(eqn)) or any(map(self.has_gradient, bodies(eqn)))
                for eqn in inner.eqns
            )
            # Keep the jaxpr alive, so that no other object gets its id.
            self._known[id(inner)] = inner, found
        return self._known[id(inner)][1]


def backward_reads(body: Body) -> Iterator[BackwardRead]:
    """List the values that the backward passes of a program read from their forward passes.

    A value that several equations read appears once, or twice if it is an input of one gradient
    and a result of another.
    """
    return _reads_in(body, _GradientBodies())


def _reads_in(body: Body, gradients: _GradientBodies) -> Iterator[BackwardRead]:
    passes = _number_gradients(body.jaxpr.eqns)
    made = {v: passes[id(eqn)] for eqn in body.jaxpr.eqns for v in eqn.outvars}
    seen: set[tuple[int, bool]] = set()
    for eqn in body.jaxpr.eqns:
        reader = passes[id(eqn)]
        if not any(reader.backward):
            for inside in filter(gradients.has_gradient, bodies(eqn)):
                yield from _reads_in(body.child(eqn, inside, entered=False), gradients)
            continue
        for atom in eqn.invars:
            if isinstance(atom, _jax.Literal):
                continue
            given = _reads_input(reader, made.get(atom, _BEFORE))
            if given is not None and (id(atom), given) not in seen:
                seen.add((id(atom), given))
                yield BackwardRead(body, atom, given)


def _number_gradients(eqns: list[Equation]) -> dict[int, _Passes]:
    """Number the consecutive gradients; return the passes of each equation by its id."""
    found: dict[int, _Passes] = {}
    gradient, was_backward = -1, True
    for eqn in eqns:
        backward = _jax.passes_of(eqn)
        if backward:
            gradient += was_backward and not backward[0]
            was_backward = backward[0]
        found[id(eqn)] = _Passes(backward, gradient)
    return found


def _reads_input(reader: _Passes, maker: _Passes) -> bool | None:
    """Return whether a backward pass reads an input of its gradient; None if it keeps no residual.

    Values computed after the forward pass began, but not by it, are cotangents of the results.
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
