"""The jaxprs inside equations."""

from collections.abc import Iterator
from typing import Any

from tapax import _jax
from tapax._jax import Equation, Jaxpr


def bodies(eqn: Equation) -> Iterator[Any]:
    """The jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for part in value if isinstance(value, _jax.SEQUENCES) else (value,):
            body = _jax.hidden_body(part)
            body = part if body is None else body
            if hasattr(_jax.open_jaxpr(body), "eqns"):
                yield body


def list_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Lists the equations of a program, those in the bodies of equations included."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in bodies(eqn):
            yield from list_equations(body)
