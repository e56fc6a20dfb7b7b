"""Handlers, which restage equations with bodies so that the values of their taps come out.

A handler takes the walk, the equation and its operands, and returns the results of the equation. It
drops the operands that are tokens, has the walk enter the body, binds the equation with the new
body, and changes the entries recorded inside as they leave that body. To add a primitive, add a
function, a row to this table, and a test.
"""

from collections.abc import Mapping

from tapax._jaxpr.kinds import Kind
from tapax._walk.handlers.cond import walk_cond
from tapax._walk.handlers.custom_rules import walk_custom_jvp, walk_custom_vjp
from tapax._walk.handlers.jit import walk_call, walk_copies, walk_jit
from tapax._walk.handlers.linear_solve import walk_linear_solve
from tapax._walk.handlers.remat import walk_remat
from tapax._walk.handlers.scan import walk_scan
from tapax._walk.handlers.shard_map import walk_shard_map
from tapax._walk.handlers.while_loop import walk_while
from tapax._walk.interpreter import Handler

HANDLERS: Mapping[Kind, Handler] = {
    Kind.JIT: walk_jit,
    Kind.CALL: walk_call,
    Kind.COPY: walk_copies,
    Kind.REMAT: walk_remat,
    Kind.SCAN: walk_scan,
    Kind.COND: walk_cond,
    Kind.WHILE: walk_while,
    Kind.CUSTOM_JVP: walk_custom_jvp,
    Kind.CUSTOM_VJP: walk_custom_vjp,
    Kind.LINEAR_SOLVE: walk_linear_solve,
    Kind.SHARD_MAP: walk_shard_map,
}
"""The handler of each kind of equation."""
