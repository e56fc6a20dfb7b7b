"""The jaxprs inside equations."""

from collections.abc import Iterator
from typing import Any

from tapax import _jax
from tapax._jax import Equation


def bodies(eqn: Equation) -> Iterator[Any]:
    """The jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for part in value if isinstance(value, _jax.SEQUENCES) else (value,):
            body = _jax.hidden_body(part)
            body = part if body is None else body
            if hasattr(_jax.open_jaxpr(body), "eqns"):
                yield body
