"""The handler of `lax.custom_linear_solve`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tapax import _jax
from tapax._jax import Equation, Value, typed
from tapax._marks.marked_jaxprs import strip
from tapax._sites import SiteError
from tapax._walk.interpreter import Interpreter


def walk_linear_solve(walk: Interpreter, eqn: Equation, args: list[Any]) -> list[Any]:
    """Return the marked values of the solver through its auxiliary result."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    args = walk.materialize(eqn.invars, args)
    consts, at = {}, 0
    for name, length in zip(lengths._fields, lengths, strict=True):
        consts[name], at = args[at : at + length], at + length
    b = args[at:]
    threads, changes_met_in = walk.enter(jaxprs.solve), walk.changes.recorder()
    shield = "jax.lax.custom_linear_solve, whose derivative is that of the equation it solves"
    staged = walk.stage(jaxprs.solve, [*consts["solve"], *b], threads, shield=shield)
    if changes_met_in(jaxprs.solve):
        raise SiteError(
            "A site inside of jax.lax.custom_linear_solve cannot be edited or perturbed, because "
            "JAX differentiates the equation and not the solver. Mark an operand of the solve "
            "instead."
        )
    # The solver does not use the parts of changes of other calls.
    parts = map(jax.lax.stop_gradient, walk.changes.arrays(threads.parts))
    extra = [*walk.folds.arrays(threads.folds), *parts]

    def apply(name: str) -> Callable[[Sequence[Value]], list[Value]]:
        jaxpr = getattr(jaxprs, name)
        return lambda x: _jax.as_function(strip(jaxpr))(*consts[name], *x)

    def solve(_: Any, b: Value) -> Any:
        results = _jax.as_function(staged.jaxpr)(*consts["solve"], *b, *extra)
        return results[: len(b)], results[len(b) :]

    def transposed(_: Any, b: Value) -> Any:
        results = apply("transpose_solve")(b)
        rest = _jax.open_jaxpr(staged.jaxpr).outvars[len(b) :]
        return results[: len(b)], [_jax.zeros(v.aval) for v in rest]

    x, aux = typed.custom_linear_solve(
        apply("matvec"),
        list(b),
        solve,
        transposed if jaxprs.transpose_solve is not None else None,
        # Otherwise JAX transposes `matvec`, which is not possible for every symmetric one.
        symmetric=jaxprs.vecmat is jaxprs.matvec,
        has_aux=True,
    )
    return walk.unstage(staged, [*x, *aux])
