"""Evaluation of jaxprs, equation by equation, and inlining of calls.

The caller decides what the variables hold: arrays, or the facts of an analysis. `apply` computes
the results of one equation, and `literal` converts a literal to such a value or fact.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from tapax import _jax
from tapax._jax import Atom, Equation, Jaxpr, Value, Var, typed
from tapax._jaxpr.bodies import implementation
from tapax._jaxpr.kinds import Kind, kind_of

Apply = Callable[[int, Equation, list[Any]], Sequence[Any]]
"""A function of the number of an equation, the equation and its operands; returns its results."""


def bind_in_context(number: int, eqn: Equation, values: Sequence[Value]) -> list[Value]:
    """Evaluate an equation under its name stack and settings."""
    del number
    results = _jax.emit_equation(eqn, values)
    return _jax.in_context(eqn, _jax.bind_equation, eqn, values) if results is None else results


def read(
    env: Mapping[Var, Any], atom: Atom, literal: Callable[[Any], Any] = _jax.literal_value
) -> Any:
    """Return the value of a variable in `env`, or `literal(atom)` for a literal."""
    return literal(atom) if isinstance(atom, _jax.Literal) else env[atom]


def evaluate_equations(
    eqns: Sequence[Equation],
    env: MutableMapping[Var, Any],
    apply: Apply = bind_in_context,
    literal: Callable[[Any], Any] = _jax.literal_value,
) -> None:
    """Evaluate equations on the variables in `env`, and add their results to it."""
    for number, eqn in enumerate(eqns):
        outs = apply(number, eqn, [read(env, v, literal) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))


def evaluate(
    jaxpr: Jaxpr,
    args: Sequence[Any],
    apply: Apply = bind_in_context,
    literal: Callable[[Any], Any] = _jax.literal_value,
) -> list[Any]:
    """Evaluate a program."""
    inner = _jax.open_jaxpr(jaxpr)
    env = dict(_jax.jaxpr_inputs(jaxpr, args))
    evaluate_equations(inner.eqns, env, apply, literal)
    return [read(env, v, literal) for v in inner.outvars]


def inline(
    jaxpr: Jaxpr, kinds: Kind, apply: Apply = bind_in_context, *, implementations: bool = False
) -> Jaxpr:
    """Replace calls of some kinds by their bodies, and calls of these kinds inside them too.

    With `implementations`, also replace the primitives of other libraries whose implementation
    JAX can trace. `apply` evaluates the other equations.
    """

    def run(number: int, eqn: Equation, values: list[Value]) -> Sequence[Value]:
        body = implementation(eqn) if implementations else None
        body = _jax.call_body(eqn) if kind_of(eqn) & kinds else body
        if body is None:
            return apply(number, eqn, values)
        return _jax.in_context(eqn, evaluate, body, values, run)

    types = [v.aval for v in _jax.open_jaxpr(jaxpr).invars]
    return typed.make_jaxpr(lambda *args: evaluate(jaxpr, args, run))(*types)
