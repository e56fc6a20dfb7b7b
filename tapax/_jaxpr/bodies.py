"""The jaxprs inside equations."""

from collections.abc import Iterable, Iterator
from typing import Any

from tapax import _jax
from tapax._jax import Equation, Jaxpr, typed
from tapax._jaxpr.kinds import Kind, kind_of

_WITHOUT_BODIES = frozenset({bool, complex, float, int, str, type(None)})
"""The types of most parameters, to skip them in little time."""


def bodies(eqn: Equation) -> list[Any]:
    """Return the jaxprs in the parameters of an equation."""
    found: list[Any] = []
    _add_bodies(eqn.params.values(), found)
    return found


def _add_bodies(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        if type(value) in _WITHOUT_BODIES:
            continue
        if isinstance(value, _jax.SEQUENCES):
            _add_bodies(value, found)
            continue
        body = _jax.hidden_body(value)
        body = value if body is None else body
        if hasattr(_jax.open_jaxpr(body), "eqns"):
            found.append(body)


def list_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yield the equations of a program, each followed by the equations of its bodies."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in bodies(eqn):
            yield from list_equations(body)


def list_distinct_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yield the equations of a program and of its bodies; those of a body once, if called often."""
    seen: dict[int, Any] = {}  # with each body, so that no other body takes its id

    def list_new(body: Jaxpr) -> Iterator[Equation]:
        opened = _jax.open_jaxpr(body)
        if id(opened) in seen:
            return
        seen[id(opened)] = opened
        for eqn in opened.eqns:
            yield eqn
            for inner in bodies(eqn):
                yield from list_new(inner)

    return list_new(jaxpr)


def implementation(eqn: Equation) -> Jaxpr | None:
    """Trace the Python implementation of another library's primitive.

    Return None for primitives of JAX, and for primitives that only a compiled kernel evaluates.
    """
    if kind_of(eqn) is not Kind.OPAQUE or _jax.is_jax_primitive(eqn.primitive):
        return None
    types = [v.aval for v in eqn.invars]
    try:
        traced = typed.make_jaxpr(lambda *args: _jax.implement_equation(eqn, args))(*types)
    except Exception:  # a kernel that rejects traced values may raise anything
        return None
    # Most kernels evaluate their primitive by compiling it.
    is_itself = any(inner.primitive is eqn.primitive for inner in list_equations(traced))
    return None if is_itself else traced
