"""Calls to the host from a running program."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax._src import callback as _callback
from jax.extend.core import Primitive
from jax.interpreters import mlir

from tapax._jax.types import Value

_call_host_p = Primitive("call_host")
_call_host_p.multiple_results = True


def call_host(function: Callable[..., None], *arrays: Value) -> None:
    """Call `function` on the host with NumPy arrays each time the program reaches this call.

    JAX's `io_callback` first puts the operands on a device of the host, which takes most of the
    time of a call. Here `function` receives the buffers of the program, which reuses their memory
    afterwards, so `function` must copy the arrays that it keeps.
    """
    _call_host_p.bind(*arrays, function=function)


def _call(*arrays: Value, function: Callable[..., None]) -> list[Value]:
    function(*map(np.asarray, arrays))
    return []


def _lower(ctx: Any, *operands: Any, function: Callable[..., None]) -> Any:
    def call(*arrays: Any) -> tuple[()]:
        function(*arrays)
        return ()

    context = ctx.module_context.axis_context
    results, _, _ = mlir.emit_python_callback(
        ctx,
        call,
        None,
        operands,
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=False,
        sharding=_callback._callback_op_sharding(context, None, ctx.avals_out),
    )
    return results


_call_host_p.def_impl(_call)
_call_host_p.def_abstract_eval(lambda *avals, function: [])
mlir.register_lowering(_call_host_p, _lower)
