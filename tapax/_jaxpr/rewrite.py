"""Rewriting of jaxprs without evaluation."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tapax import _jax
from tapax._jax import AbstractValue, Atom, Equation, Jaxpr, PyTree, Var, typed
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.kinds import CALLS, Kind, kind_of

Visit = Callable[[Equation, dict[Var, Atom]], Iterable[Equation]]
"""A function of an equation and the renamed variables; returns the equations that replace it.

The operands of the equation are renamed already. The function may rename more variables for the
equations that follow.
"""

_RUNS_ONCE = CALLS | Kind.REMAT | Kind.SHARD_MAP


def rewrite(
    jaxpr: Jaxpr,
    visit: Visit,
    drop_effects: frozenset[Any] = frozenset(),
    more_inputs: Sequence[Var] = (),
) -> Jaxpr:
    """Rewrite the equations of a program, append `more_inputs` and remove `drop_effects`."""
    inner = _jax.open_jaxpr(jaxpr)
    names: dict[Var, Atom] = {}

    def rename(atom: Atom) -> Atom:
        return atom if isinstance(atom, _jax.Literal) else names.get(atom, atom)

    eqns: list[Equation] = []
    for eqn in inner.eqns:
        if names:
            eqn = eqn.replace(invars=[rename(v) for v in eqn.invars])
        eqns += visit(eqn, names)
    new = inner.replace(
        invars=[*inner.invars, *more_inputs],
        outvars=[rename(v) for v in inner.outvars],
        eqns=eqns,
        effects=frozenset(inner.effects) - drop_effects,
    )
    return _jax.with_open_jaxpr(jaxpr, new)


def drop_after_results(jaxpr: Jaxpr) -> Jaxpr:
    """Drop the equations after the last one that computes a result, with their effects.

    JAX's elimination of dead code keeps equations with effects, such as `jax.debug.print`, and all
    that they need.
    """
    inner = _jax.open_jaxpr(jaxpr)
    results = {v for v in inner.outvars if not isinstance(v, _jax.Literal)}
    eqns = list(inner.eqns)
    while eqns and results.isdisjoint(eqns[-1].outvars):
        eqns.pop()
    if eqns and kind_of(eqns[-1]) in _RUNS_ONCE:
        eqns[-1] = map_equation_bodies(eqns[-1], drop_after_results)
        eqns[-1] = eqns[-1].replace(effects=_remaining(eqns[-1].effects, bodies(eqns[-1])))
    effects = _remaining(inner.effects, eqns)
    return _jax.with_open_jaxpr(jaxpr, inner.replace(eqns=eqns, effects=effects))


def _remaining(effects: Iterable[Any], parts: Iterable[Any]) -> frozenset[Any]:
    """Return the effects of some parts of a program, and those on an input by its number."""
    kept = frozenset[Any]().union(*(part.effects for part in parts))
    return frozenset(e for e in effects if e in kept or hasattr(e, "input_index"))


def map_bodies(value: PyTree, fn: Callable[[Jaxpr], Any]) -> Any:
    """Apply `fn` to every jaxpr in a parameter of an equation.

    A body inside the callee of a `call_hi_primitive` cannot be replaced: `map_bodies` calls `fn` on
    it and ignores the result.
    """
    if isinstance(value, _jax.SEQUENCES):
        parts = [map_bodies(part, fn) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    hidden = _jax.hidden_body(value)
    if hidden is not None:
        fn(hidden)
        return value
    return fn(value) if hasattr(_jax.open_jaxpr(value), "eqns") else value


def map_equation_bodies(
    eqn: Equation, fn: Callable[[Jaxpr], Any], drop_effects: frozenset[Any] = frozenset()
) -> Equation:
    """Apply `fn` to every jaxpr in the parameters of an equation."""
    params = {name: map_bodies(value, fn) for name, value in eqn.params.items()}
    return eqn.replace(params=params, effects=frozenset(eqn.effects) - drop_effects)


def zeros_equation(variable: Var, eqn: Equation) -> Equation:
    """Make an equation that sets a variable to zeros, in the context of `eqn`: its mesh."""
    return _equation_of(variable.aval).replace(outvars=[variable], ctx=eqn.ctx)


def _equation_of(aval: AbstractValue) -> Equation:
    (eqn,) = _jax.open_jaxpr(typed.make_jaxpr(lambda: _jax.zeros(aval))()).eqns
    return eqn
