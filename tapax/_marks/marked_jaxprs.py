"""Jaxprs that hold taps, read and rewritten without being evaluated."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core.primitives import clamp_p, convert_element_type_p

from tapax import _jax
from tapax._jax import Atom, Equation, Jaxpr, OpenJaxpr, PyTree, Var
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.rewrite import map_bodies, map_equation_bodies, rewrite, zeros_equation
from tapax._marks.change import change_p
from tapax._marks.scopes import Scopes, scopes_of
from tapax._marks.tap import Mark, tap_effect, tap_p


def strip(value: PyTree, marks: list[Mark] | None = None) -> Any:
    """A jaxpr, or a structure with some in it, without its taps, whose marks go to `marks`.

    Where a body cannot be replaced, its marks are found all the same.
    """
    found = [] if marks is None else marks
    uids = Uids()

    def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
        if eqn.primitive is tap_p:
            if eqn.params["kind"] == "value":
                found.append(eqn.params["mark"].within(scopes_of(eqn)))
            names[eqn.outvars[0]] = eqn.invars[0]
            yield from map(zeros_equation, eqn.outvars[1:])
        elif eqn.primitive is not change_p:
            yield map_equation_bodies(eqn, strip_body, TAPS)
        # Without an edit its function is the identity: higher derivatives of that are zero.
        elif eqn.params["order"] < 2:
            names[eqn.outvars[0]] = eqn.invars[-1]
        else:
            yield zeros_equation(eqn.outvars[0])

    def strip_body(jaxpr: Jaxpr) -> Jaxpr:
        # The taps of what is computed again in a backward pass have no effect.
        is_marked = _is_tapped(jaxpr) or uids.within(jaxpr)
        return rewrite(jaxpr, visit, TAPS) if is_marked else jaxpr

    return map_bodies(value, strip_body)


TAPS: frozenset[Any] = frozenset({tap_effect})
"""The effect that keeps taps alive."""


def _is_tapped(jaxpr: Jaxpr) -> bool:
    return tap_effect in _jax.open_jaxpr(jaxpr).effects


def quieted(value: PyTree, grads: bool = False) -> Any:
    """A jaxpr, or a structure with some in it, whose taps are not kept where nothing uses them.

    Marked values become copies of such values; with `grads`, marked gradients become tangents.
    """

    def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
        del names
        eqn = map_equation_bodies(eqn, quiet_body, TAPS)
        if eqn.primitive is tap_p:
            kind = "copy" if eqn.params["kind"] == "value" else eqn.params["kind"]
            kind = kind.replace("grad", "tangent") if grads else kind
            eqn = eqn.replace(params=dict(eqn.params, kind=kind))
        yield eqn

    def quiet_body(jaxpr: Jaxpr) -> Jaxpr:
        return rewrite(jaxpr, visit, TAPS) if _is_tapped(jaxpr) else jaxpr

    return map_bodies(value, quiet_body)


def reaching(jaxpr: Jaxpr, results: Sequence[int] | None = None) -> frozenset[int]:
    """The marks of a program whose taps are needed for its results, or for some of them."""
    return Uids().within(_jax.dce(quieted(jaxpr, grads=True), results))


class Uids:
    """The marks in bodies, by which their taps and the changes of those are known."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, frozenset[int]]] = {}

    def within(self, jaxpr: Jaxpr) -> frozenset[int]:
        inner = _jax.open_jaxpr(jaxpr)
        if id(inner) not in self._known:
            found: set[int] = set()
            for eqn in inner.eqns:
                if eqn.primitive in (tap_p, change_p):
                    found.add(eqn.params["mark"].uid)
                for body in bodies(eqn):
                    found |= self.within(body)
            # The jaxpr is kept so that its id stays its own.
            self._known[id(inner)] = inner, frozenset(found)
        return self._known[id(inner)][1]


class TappedBodies:
    """Which bodies hold taps. Some equations keep the effects of theirs to themselves."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bool]] = {}

    def holds(self, jaxpr: Jaxpr) -> bool:
        """Whether there is a tap in a body, or in a body of its equations."""
        inner = _jax.open_jaxpr(jaxpr)
        if tap_effect in inner.effects:
            return True
        if id(inner) not in self._known:
            found = any(self.holds(body) for eqn in inner.eqns for body in bodies(eqn))
            # The jaxpr is kept so that its id stays its own.
            self._known[id(inner)] = inner, found
        return self._known[id(inner)][1]


def first_uid(jaxpr: Jaxpr) -> int:
    """The number of the mark that was traced first in a body; a large one without any mark.

    Marks in jitted functions count only where there are no others, because such a function may have
    been traced long before.
    """
    own, jitted = _uids(jaxpr)
    return min(own or jitted, default=sys.maxsize)


def _uids(jaxpr: Jaxpr) -> tuple[list[int], list[int]]:
    """The marks in a body, and those of the jitted functions that it calls."""
    own: list[int] = []
    jitted: list[int] = []
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if eqn.primitive is tap_p:
            own.append(eqn.params["mark"].uid)
        elif tap_effect in eqn.effects:
            for inside, inside_jitted in map(_uids, bodies(eqn)):
                (jitted if kind_of(eqn) is Kind.JIT else own).extend(inside)
                jitted += inside_jitted
    return own, jitted


def count_calls(jaxpr: Jaxpr, scopes: Scopes = ()) -> Counter[str]:
    """How often each site is called in a body."""
    found: Counter[str] = Counter()
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        here = scopes_of(eqn, scopes)
        if eqn.primitive is tap_p and eqn.params["kind"] == "value":
            found[eqn.params["mark"].within(here).path] += 1
        elif tap_effect in eqn.effects:
            for body in bodies(eqn):
                found += count_calls(body, here)
    return found


def is_of_two(jaxpr: OpenJaxpr, eqn: Equation) -> bool:
    """Whether a conditional was written as `lax.cond`, which puts the branch for true second.

    Its index is a boolean made a number, where that of `lax.switch` is clamped. Where neither is to
    be seen, the branch that was traced first was written first.
    """
    index, branches = eqn.invars[0], eqn.params["branches"]
    for maker in jaxpr.eqns:
        if index in maker.outvars and maker.primitive in (convert_element_type_p, clamp_p):
            return maker.invars[0].aval.dtype == bool
    return len(branches) == 2 and first_uid(branches[1]) < first_uid(branches[0])
