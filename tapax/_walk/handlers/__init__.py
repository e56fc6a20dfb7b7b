"""Handlers of the equations that have bodies: how each is re-staged so that its taps come out.

A handler takes the walk, the equation and its operands, and returns the equation's results. It
drops the operands that are tokens, has the body walked, binds the equation again with the new body,
and says how leaving that body changes the entries recorded inside. Adding a primitive is adding a
function, a row of this table, and a test.
"""

from collections.abc import Mapping

from tapax._walk.handlers.cond import walk_cond
from tapax._walk.handlers.custom_rules import walk_custom_jvp, walk_custom_vjp
from tapax._walk.handlers.jit import walk_barrier, walk_call, walk_jit
from tapax._walk.handlers.linear_solve import walk_linear_solve
from tapax._walk.handlers.remat import walk_remat
from tapax._walk.handlers.scan import walk_scan
from tapax._walk.handlers.shard_map import walk_shard_map
from tapax._walk.handlers.while_loop import walk_while
from tapax._walk.interpreter import Handler

HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys(("jit", "pjit"), walk_jit),
    **dict.fromkeys(
        ("closed_call", "core_call", "call", "eval_jaxpr", "core_closed_call"), walk_call
    ),
    "optimization_barrier": walk_barrier,
    **dict.fromkeys(("remat2", "remat", "checkpoint"), walk_remat),
    "scan": walk_scan,
    "cond": walk_cond,
    "while": walk_while,
    **dict.fromkeys(("custom_jvp_call", "CustomJVPTraced", "RematTraced"), walk_custom_jvp),
    **dict.fromkeys(
        ("custom_vjp_call", "custom_vjp_call_jaxpr", "CustomVJPTraced"), walk_custom_vjp
    ),
    **dict.fromkeys(("custom_linear_solve", "linear_solve"), walk_linear_solve),
    "shard_map": walk_shard_map,
}
"""The handler of each kind of equation, by the name that `_jax.kind_of` gives it."""
