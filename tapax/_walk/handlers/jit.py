"""The handlers of `jit`, of other plain calls, and of barriers."""

from typing import Any

from tapax import _jax
from tapax._walk.entries import Slots
from tapax._walk.interpreter import Interpreter, eager


def walk_jit(walk: Interpreter, eqn: Any, args: list[Any]) -> list[Any]:
    params = dict(eqn.params)
    body = params["jaxpr"]
    if eager():
        return walk.run(body, args)
    staged = walk.stage(body, args)
    operands = walk.operands(staged, args)

    def inputs(name: str, fill: Any) -> tuple[Any, ...]:
        own = [params[name][i] for i in staged.ins.kept]
        return (*own, *(fill for _ in operands[len(own) :]))

    def outputs(name: str, fill: Any) -> tuple[Any, ...]:
        return (*(params[name][i] for i in staged.outs.kept), *(fill for _ in staged.types))

    params.update(
        jaxpr=staged.jaxpr,
        donated_invars=inputs("donated_invars", False),
        in_shardings=inputs("in_shardings", _jax.UNSPECIFIED),
        in_layouts=inputs("in_layouts", None),
        out_shardings=outputs("out_shardings", _jax.UNSPECIFIED),
        out_layouts=outputs("out_layouts", None),
    )
    return walk.unstage(staged, eqn.primitive.bind(*operands, **params))


def walk_call(walk: Interpreter, eqn: Any, args: list[Any]) -> list[Any]:
    (name,) = (k for k in eqn.params if k in ("call_jaxpr", "jaxpr"))
    body = eqn.params[name]
    if eager() or not hasattr(body, "consts"):
        return walk.run(body, args)
    staged = walk.stage(body, args)
    bound = eqn.replace(params={**eqn.params, name: staged.jaxpr})
    return walk.unstage(staged, _jax.bind_equation(bound, walk.operands(staged, args)))


def walk_barrier(walk: Interpreter, eqn: Any, args: list[Any]) -> list[Any]:
    slots = Slots.of(args)
    return slots.fill(iter(_jax.bind_equation(eqn, slots.arrays(args))))
