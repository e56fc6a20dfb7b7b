"""The handlers of `jit`, of other plain calls, and of copies."""

from jax.lax import optimization_barrier_p

from tapax import _jax
from tapax._jax import Equation, Value
from tapax._jaxpr.kinds import kind_of_primitive
from tapax._jaxpr.restage import bind_call, bind_jit, is_eager
from tapax._walk.calls import Token
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
    # The other parameters of another library's primitive might depend on its body: inline it.
    if is_eager() or not hasattr(body, "consts") or not kind_of_primitive(eqn.primitive):
        return walk.run(body, args)
    staged = walk.stage(body, args)
    return walk.unstage(staged, bind_call(eqn, staged.jaxpr, *walk.operands(staged, args)))


def walk_copies(walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
    if eqn.primitive is optimization_barrier_p:
        slots = Slots.of(args)
        return slots.fill(iter(_jax.bind_equation(eqn, slots.arrays(args))))
    if all(type(a) is Token and a.array is None for a in args):
        return args
    copies = _jax.bind_equation(eqn, walk.materialize(eqn.invars, args))
    return [
        Token(a.calls, None if a.array is None else x) if type(a) is Token else x
        for a, x in zip(args, copies, strict=True)
    ]
