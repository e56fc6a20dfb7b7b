"""Jaxprs that hold taps, read and rewritten without being evaluated."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from tapax import _jax
from tapax._jaxpr.bodies import bodies
from tapax._marks.change import change_p
from tapax._marks.scopes import Scopes, scopes_of
from tapax._marks.tap import Mark, tap_effect, tap_p


def strip(value: Any, marks: list[Mark] | None = None) -> Any:
    """A jaxpr, or a structure with some in it, without its taps, whose marks go to `marks`.

    Where a body cannot be replaced, its marks are found all the same.
    """
    marks = [] if marks is None else marks
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(strip(v, marks) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(strip(v, marks) for v in value)
    hidden = _jax.hidden_body(value)
    if hidden is not None:
        strip(hidden, marks)
        return value
    inner = _jax.open_jaxpr(value)
    if not hasattr(inner, "eqns") or tap_effect not in inner.effects:
        return value
    renamed: dict[Any, Any] = {}

    def rename(v: Any) -> Any:
        return v if isinstance(v, _jax.Literal) else renamed.get(v, v)

    eqns = []
    for eqn in inner.eqns:
        if eqn.primitive is tap_p:
            if eqn.params["kind"] == "value":
                marks.append(eqn.params["mark"].within(scopes_of(eqn)))
            renamed[eqn.outvars[0]] = rename(eqn.invars[0])
            eqns += [_zeros(token) for token in eqn.outvars[1:]]
            continue
        if eqn.primitive is change_p:
            # Without an edit its function is the identity: higher derivatives of that are zero.
            if eqn.params["order"] < 2:
                renamed[eqn.outvars[0]] = rename(eqn.invars[-1])
            else:
                eqns.append(_zeros(eqn.outvars[0]))
            continue
        params = {k: strip(v, marks) for k, v in eqn.params.items()}
        invars = [rename(v) for v in eqn.invars]
        eqns.append(eqn.replace(invars=invars, params=params, effects=without_taps(eqn.effects)))
    outvars = [rename(v) for v in inner.outvars]
    return _rewritten(value, eqns, outvars)


def without_taps(effects: Iterable[Any]) -> frozenset[Any]:
    """Effects without the one that keeps taps alive."""
    return frozenset(effects) - {tap_effect}


def _rewritten(jaxpr: Any, eqns: list[Any], outvars: list[Any]) -> Any:
    """A jaxpr, open or closed, with other equations and results, whose taps are not kept."""
    inner = _jax.open_jaxpr(jaxpr)
    new = inner.replace(eqns=eqns, outvars=outvars, effects=without_taps(inner.effects))
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


def _zeros(variable: Any) -> Any:
    """An equation that gives zeros."""
    made = jax.make_jaxpr(lambda: _jax.zeros(variable.aval))()
    (eqn,) = _jax.open_jaxpr(made).eqns
    return eqn.replace(outvars=[variable])


def quieted(value: Any, again: str | None = "copy") -> Any:
    """A jaxpr, or a structure with some in it, whose taps are not kept where nothing uses them.

    Marked values are there as values that are computed once `again`.
    """
    if type(value) is tuple:
        return tuple(quieted(v, again) for v in value)
    inner: Any = _jax.open_jaxpr(value)
    if not hasattr(inner, "eqns") or tap_effect not in inner.effects:
        return value
    eqns = []
    for eqn in inner.eqns:
        params = {k: quieted(v, again) for k, v in eqn.params.items()}
        if again and eqn.primitive is tap_p and params["kind"] == "value":
            params["kind"] = again
        eqns.append(eqn.replace(params=params, effects=without_taps(eqn.effects)))
    return _rewritten(value, eqns, inner.outvars)


def reaching(jaxpr: Any, results: Sequence[int] | None = None) -> frozenset[int]:
    """The marks of a program whose taps are needed for its results, or for some of them."""
    return Uids().within(_jax.dce(quieted(jaxpr, again=None), results))


class Uids:
    """The marks in bodies, by which their taps and the changes of those are known."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, frozenset[int]]] = {}

    def within(self, jaxpr: Any) -> frozenset[int]:
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


def first_uid(jaxpr: Any) -> int:
    """The first mark that was traced in a body; a large number if there is none."""
    uids = [
        eqn.params["mark"].uid if eqn.primitive is tap_p else min(map(first_uid, bodies(eqn)))
        for eqn in _jax.open_jaxpr(jaxpr).eqns
        if tap_effect in eqn.effects
    ]
    return min(uids, default=sys.maxsize)


def count_calls(jaxpr: Any, scopes: Scopes = ()) -> Counter[str]:
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


def is_of_two(jaxpr: Any, eqn: Any) -> bool:
    """Whether a conditional was written as `lax.cond`, which puts the branch for true second.

    Its index is a boolean made a number, where that of `lax.switch` is clamped. Where neither is to
    be seen, the branch that was traced first was written first.
    """
    index, branches = eqn.invars[0], eqn.params["branches"]
    for maker in jaxpr.eqns:
        if index in maker.outvars and maker.primitive.name in ("convert_element_type", "clamp"):
            return maker.invars[0].aval.dtype == bool
    return len(branches) == 2 and first_uid(branches[1]) < first_uid(branches[0])
