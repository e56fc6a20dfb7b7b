"""The jaxprs inside equations."""

from collections.abc import Iterator
from typing import Any

from tapax import _jax
from tapax._jax import Equation, Jaxpr, PyTree, typed
from tapax._jaxpr.kinds import Kind, kind_of


def bodies(eqn: Equation) -> Iterator[Any]:
    """The jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        yield from _bodies_in(value)


def _bodies_in(value: PyTree) -> Iterator[Any]:
    if isinstance(value, _jax.SEQUENCES):
        for part in value:
            yield from _bodies_in(part)
        return
    body = _jax.hidden_body(value)
    body = value if body is None else body
    if hasattr(_jax.open_jaxpr(body), "eqns"):
        yield body


def list_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Lists the equations of a program, those in the bodies of equations included."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in bodies(eqn):
            yield from list_equations(body)


def implementation(eqn: Equation) -> Jaxpr | None:
    """Traces the function by which another library evaluates its primitive.

    It returns None for a primitive of JAX, and for one that only a compiled kernel evaluates.
    """
    if kind_of(eqn) is not Kind.OPAQUE or _jax.is_own_primitive(eqn.primitive):
        return None
    types = [v.aval for v in eqn.invars]
    try:
        traced = typed.make_jaxpr(lambda *args: _jax.implement_equation(eqn, args))(*types)
    except Exception:  # whatever a kernel raises that takes no traced values
        return None
    # Most kernels are evaluated by compiling the primitive itself.
    is_itself = any(inner.primitive is eqn.primitive for inner in list_equations(traced))
    return None if is_itself else traced
