"""Values that derivative rules sow, if the derivative is taken around the harvest, not inside it.

`jax.jvp(call_and_reap(f), ...)` differentiates the program during its walk: for a function with a
custom rule, the rule runs instead of the function. So the harvest reaps the values of the rule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from tapax import _jax
from tapax._jax import Equation, PyTree, Static, Value, typed
from tapax._jaxpr import derivatives
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._marks.context import MarkingPolicy
from tapax._marks.operations import with_marks
from tapax._walk.entries import StagedBody
from tapax._walk.interpreter import Interpreter


def runs_rules(args: Sequence[Value]) -> bool:
    """Return whether JAX differentiates a function of these values during the call."""
    ran = []

    @jax.custom_jvp
    def probe(*args: Value) -> tuple[()]:
        return ()

    def rule(primals: PyTree, tangents: PyTree) -> Any:
        ran.append(True)
        return (), ()

    probe.defjvp(rule)
    probe(*args)
    return bool(ran)


def walk_rule(
    walk: Interpreter, eqn: Equation, args: Sequence[Value], policy: MarkingPolicy
) -> list[Value]:
    """Evaluate a call of a function with a custom rule, and walk the rule."""

    def bind(*flat: Value) -> list[Value]:
        return _jax.bind_equation(eqn, flat)

    if kind_of(eqn) is Kind.CUSTOM_VJP:
        call = _by_pullback(walk, eqn, bind, policy)
    else:
        call = _by_tangents(walk, bind, policy)
    results, staged = call(*args)
    count = len(eqn.outvars)
    others = staged.value.count - count
    return walk.unstage(staged.value, [*results[:count], *[None] * others, *results[count:]])[
        :count
    ]


def _by_tangents(
    walk: Interpreter, bind: Callable[..., Any], policy: MarkingPolicy
) -> Callable[..., Any]:
    call = jax.custom_jvp(lambda *flat: (bind(*flat), None))

    def rule(primals: PyTree, tangents: PyTree) -> Any:
        count = len(primals)
        moves = {i: t for i, t in enumerate(tangents) if type(t) is not SymbolicZero}

        def both(*flat: Value) -> Any:
            return derivatives.jvp(bind, flat[:count], list(moves), flat[count:])

        staged, (outs, moved), rest = _evaluate(walk, both, [*primals, *moves.values()], policy)
        still = [zero_from_primal(x) for x in rest]
        return ([*outs, *rest], Static(staged)), ([*moved, *still], Static(staged))

    call.defjvp(rule, symbolic_zeros=True)
    return call


def _by_pullback(
    walk: Interpreter, eqn: Equation, bind: Callable[..., Any], policy: MarkingPolicy
) -> Callable[..., Any]:
    count = len(eqn.outvars)
    call = typed.custom_vjp(lambda *flat: (bind(*flat), None))

    def forward(*given: Any) -> Any:
        flat = [x.value for x in given]
        moved = [i for i, x in enumerate(given) if x.perturbed]

        def both(*flat: Value) -> Any:
            # JAX raises if one of them is a value that the function closes over.
            return derivatives.vjp(bind, flat, moved)

        staged, (outs, back), rest = _evaluate(walk, both, flat, policy)
        return ([*outs, *rest], Static(staged)), (back, Static((moved, len(flat))))

    def backward(residuals: PyTree, cts: PyTree) -> Any:
        back, numbers = residuals
        moved, size = numbers.value
        found = back([derivatives.instantiate(ct) for ct in cts[0][:count]])
        by_number = dict(zip(moved, found, strict=True))
        return tuple(by_number.get(i) for i in range(size))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _evaluate(
    walk: Interpreter, fn: Callable[..., Any], args: Sequence[Value], policy: MarkingPolicy
) -> tuple[StagedBody, Any, list[Value]]:
    """Walk a function; return the staged body, the results, and the recorded arrays."""
    with with_marks(policy):
        made, shape = typed.make_jaxpr(fn, return_shape=True)(*args)
    staged = walk.stage(made, args)
    results = iter(_jax.as_function(staged.jaxpr)(*walk.operands(staged, args)[0]))
    values = walk.materialize(_jax.open_jaxpr(made).outvars, staged.outs.fill(results))
    return staged, jax.tree.unflatten(jax.tree.structure(shape), values), list(results)
