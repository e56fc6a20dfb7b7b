"""Analysis and rewriting of jaxprs with taps, without evaluation."""

from collections.abc import Iterator, Sequence
from typing import Any

from tapax import _jax
from tapax._jax import Atom, Equation, Jaxpr, PyTree, Var
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.rewrite import map_bodies, map_equation_bodies, rewrite, zeros_equation
from tapax._marks.change import change_p
from tapax._marks.scopes import scopes_of
from tapax._marks.tap import Mark, tap_effect, tap_p


def strip(value: PyTree, marks: list[Mark] | None = None) -> Any:
    """Remove the taps from a jaxpr, or from the jaxprs in a structure; append them to `marks`.

    `marks` also gets the marks of a body that cannot be replaced.
    """
    found = [] if marks is None else marks
    uids = Uids()

    def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
        if eqn.primitive is tap_p:
            if eqn.params["kind"] == "value":
                found.append(eqn.params["mark"].within(scopes_of(eqn)))
            names[eqn.outvars[0]] = eqn.invars[0]
            yield from (zeros_equation(token, eqn) for token in eqn.outvars[1:])
        elif eqn.primitive is not change_p:
            yield map_equation_bodies(eqn, strip_body, TAPS)
        # Without an edit the function is the identity, whose higher derivatives are zero.
        elif eqn.params["order"] < 2:
            names[eqn.outvars[0]] = eqn.invars[-1]
        else:
            yield zeros_equation(eqn.outvars[0], eqn)

    def strip_body(jaxpr: Jaxpr) -> Jaxpr:
        # The taps of values that a backward pass recomputes have no effect.
        is_marked = _is_tapped(jaxpr) or uids.within(jaxpr)
        return rewrite(jaxpr, visit, TAPS) if is_marked else jaxpr

    return map_bodies(value, strip_body)


TAPS: frozenset[Any] = frozenset({tap_effect})
"""The effect that keeps taps from being eliminated as dead code."""


def _is_tapped(jaxpr: Jaxpr) -> bool:
    return tap_effect in _jax.open_jaxpr(jaxpr).effects


def quieted(value: PyTree, grads: bool = False) -> Any:
    """Make the taps in a jaxpr, or in the jaxprs in a structure, subject to dead-code elimination.

    Taps of kind `value` become `copy`; with `grads`, taps of kind `grad` become `tangent`.
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
    """Return the uids of the marks on which the results of a program, or some of them, depend."""
    return Uids().within(_jax.dce(quieted(jaxpr, grads=True), results))


class Uids:
    """A cache of the uids of the marks in bodies, from their `tap` and `change` equations."""

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
            # Keep the jaxpr alive, so that no other object gets its id.
            self._known[id(inner)] = inner, frozenset(found)
        return self._known[id(inner)][1]


class TappedBodies:
    """A cache of which bodies contain taps; some equations do not declare the effects of theirs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bool]] = {}

    def has_taps(self, jaxpr: Jaxpr) -> bool:
        """Return whether a body, or a body of one of its equations, contains a tap."""
        inner = _jax.open_jaxpr(jaxpr)
        if tap_effect in inner.effects:
            return True
        if id(inner) not in self._known:
            found = any(self.has_taps(body) for eqn in inner.eqns for body in bodies(eqn))
            # Keep the jaxpr alive, so that no other object gets its id.
            self._known[id(inner)] = inner, found
        return self._known[id(inner)][1]


def is_of_two(branches: Sequence[Any]) -> bool:
    """Return whether the branches are those of a `lax.cond`, which puts the one for true second.

    `lax.switch` makes the same equation, with its branches in the order in which they were written.
    """
    return all(_jax.traced_for(branch) == "cond" for branch in branches)
