"""The handler of `jax.checkpoint`."""

from typing import Any

from tapax import _jax
from tapax._walk.interpreter import Interpreter, eager


def walk_remat(walk: Interpreter, eqn: Any, args: list[Any]) -> list[Any]:
    """Bound again as the remat it is, else the backward half would keep what it should drop."""
    params = dict(eqn.params)
    body = params["jaxpr"]
    if eager():
        return walk.run(body, args)
    staged = walk.stage(body, args, recomputing=params["differentiated"])
    operands = walk.operands(staged, args)
    jaxpr, consts = _jax.closed(staged.jaxpr)
    if isinstance(params["prevent_cse"], tuple):
        kept = [params["prevent_cse"][i] for i in staged.ins.kept]
        handed = (False for _ in operands[len(kept) :])
        params["prevent_cse"] = (*(False for _ in consts), *kept, *handed)
    params["jaxpr"] = jaxpr
    return walk.unstage(staged, eqn.primitive.bind(*consts, *operands, **params))
