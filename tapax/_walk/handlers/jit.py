"""The handlers of `jit`, of other plain calls, and of copies."""

from tapax import _jax
from tapax._jax import Equation, Value
from tapax._jaxpr.kinds import kind_of_primitive
from tapax._jaxpr.restage import bind_call, bind_jit, is_eager
from tapax._walk.entries import Slots
from tapax._walk.interpreter import Interpreter


def walk_jit(walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
    body = eqn.params["jaxpr"]
    if is_eager():
        return walk.run(body, args)
    staged = walk.stage(body, args)
    results = [*staged.outs.kept, *(None for _ in staged.types)]
    return walk.unstage(staged, bind_jit(eqn, staged.jaxpr, *walk.operands(staged, args), results))


def walk_call(walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
    body = _jax.call_body(eqn)
    # What a primitive of another library does with its other parameters, nobody knows.
    if is_eager() or not hasattr(body, "consts") or not kind_of_primitive(eqn.primitive):
        return walk.run(body, args)
    staged = walk.stage(body, args)
    return walk.unstage(staged, bind_call(eqn, staged.jaxpr, *walk.operands(staged, args)))


def walk_copies(walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
    slots = Slots.of(args)
    arrays = slots.arrays(args)
    return slots.fill(iter(_jax.bind_equation(eqn, arrays))) if arrays else args
