"""Evaluation of jaxprs, equation by equation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tapax import _jax

Apply = Callable[[int, Any, list[Any]], list[Any]]
"""The results of an equation: from its number, itself and the values of its operands."""


def bind_in_context(number: int, eqn: Any, values: list[Any]) -> list[Any]:
    """Evaluates an equation under its own name stack and settings."""
    del number
    return _jax.in_context(eqn, _jax.bind_equation, eqn, values)


def read(env: Mapping[Any, Any], atom: Any) -> Any:
    """The value of a variable or a literal."""
    return _jax.literal_value(atom) if isinstance(atom, _jax.Literal) else env[atom]


def evaluate_equations(
    eqns: Sequence[Any], env: dict[Any, Any], apply: Apply = bind_in_context
) -> None:
    """Adds the results of equations to `env`, which has the values that they read."""
    for number, eqn in enumerate(eqns):
        outs = apply(number, eqn, [read(env, v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))


def evaluate_jaxpr(jaxpr: Any, args: Sequence[Any], apply: Apply = bind_in_context) -> list[Any]:
    """The results of a program whose equations `apply` evaluates."""
    inner = _jax.open_jaxpr(jaxpr)
    env = dict(_jax.jaxpr_inputs(jaxpr, args))
    evaluate_equations(inner.eqns, env, apply)
    return [read(env, v) for v in inner.outvars]
