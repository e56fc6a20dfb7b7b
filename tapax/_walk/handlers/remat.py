"""The handler of `jax.checkpoint`."""

from tapax import _jax
from tapax._jax import Equation, Value
from tapax._jaxpr.restage import bind_remat, is_eager
from tapax._walk.interpreter import Interpreter


def walk_remat(walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
    """Restage a remat as a remat, or its backward half would keep what it should recompute."""
    body = _jax.call_body(eqn)
    if is_eager():
        return walk.run(body, args)
    staged = walk.stage(body, args, recomputing=eqn.params.get("differentiated", False))
    return walk.unstage(staged, bind_remat(eqn, staged.jaxpr, *walk.operands(staged, args)))
