"""Equations that are appended to the program that JAX traces, without binding their primitives.

An interpreter binds most equations of a program as they are. Binding computes the types of the
results again, looks for the transformations around it, and enters the settings and the name stack
of the equation. All of this is known already, so appending the equation takes a fifth of the time.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend.core import Literal, Primitive

from tapax._jax import typed
from tapax._jax.jaxprs import jaxpr_consts, open_jaxpr
from tapax._jax.tracing import trace_context
from tapax._jax.types import Equation, Function, Value

_Trace: Any = getattr(_partial_eval, "DynamicJaxprTrace", None)
_Tracer: Any = getattr(_partial_eval, "DynamicJaxprTracer", None)
_EMIT = ["self", "in_tracers", "out_avals", "primitive", "params", "effects", "source_info", "ctx"]
_MAKE = ["trace", "aval", "val", "line_info"]
_bind = Primitive.bind
_USED = (
    (_core, ("trace_ctx", "current_jaxpr_eqn_context")),
    (_config, ("xla_metadata_context_manager",)),
    (_partial_eval, ("custom_staging_rules",)),
    (Primitive, ("is_high",)),
)


def _can_emit() -> bool:
    """Return whether this version of JAX has the functions that this module calls."""
    emit = getattr(_Trace, "emit_eqn", None)
    if not all(hasattr(module, name) for module, names in _USED for name in names):
        return False
    if emit is None or list(inspect.signature(emit).parameters) != _EMIT:
        return False
    return list(inspect.signature(_Tracer).parameters)[: len(_MAKE)] == _MAKE


_CAN_EMIT = _can_emit()


def _current_trace() -> Any:
    """Return the trace to which equations can be appended, or None."""
    # A hook may intercept `bind` to see every equation.
    if not _CAN_EMIT or Primitive.bind is not _bind:
        return None
    trace: Any = _core.trace_ctx.trace
    return trace if type(trace) is _Trace else None


def emit_equation(eqn: Equation, args: Sequence[Value], *, here: bool = False) -> Any:
    """Append an equation to the program that JAX traces, with the operands `args`.

    The equation keeps its source line and settings; with `here`, it gets the current ones. Return
    the list of its results, or None if JAX must bind the equation: under another transformation, or
    because the operands have other types than those of the equation.
    """
    trace = _current_trace()
    if trace is None or eqn.effects or not _is_plain(eqn.primitive):
        return None
    info = _source_info.current() if here else eqn.source_info
    if info.traceback is None:
        return None
    operands: list[Any] = []
    for arg, atom in zip(args, eqn.invars, strict=True):
        if isinstance(atom, Literal):
            operands.append(_Tracer(trace, atom.aval, atom, info))
        elif type(arg) is _Tracer and arg._trace is trace and _is_equal(arg.aval, atom.aval):
            operands.append(arg)
        else:
            return None
    types = [x.aval for x in operands]
    if _config.xla_metadata_context_manager.value or eqn.primitive.is_high(*types, **eqn.params):
        return None
    names = _source_info.current_name_stack()
    if names.stack and not here:
        info = info.replace(name_stack=names + info.name_stack)
    ctx = _core.current_jaxpr_eqn_context() if here else eqn.ctx
    results = [v.aval for v in eqn.outvars]
    return trace.emit_eqn(operands, results, eqn.primitive, eqn.params, eqn.effects, info, ctx)


def _is_equal(a: Any, b: Any) -> bool:
    return a is b or a == b


_STAGED_PLAINLY = {"broadcast_in_dim", "dynamic_slice", "iota", "jit", "pjit", "reshape"}
"""The primitives whose rules for staging do nothing to an equation that was staged before."""


@functools.lru_cache(maxsize=4096)
def _is_plain(primitive: Any) -> bool:
    """Return whether binding a primitive only adds an equation to the program."""
    kind, names = type(primitive), ("bind", "bind_with_trace", "get_bind_params")
    if any(getattr(kind, n) is not getattr(Primitive, n) or n in vars(primitive) for n in names):
        return False
    if any(getattr(primitive, n, False) for n in ("ref_primitive", "ref_allocating")):
        return False
    is_staged = primitive in _partial_eval.custom_staging_rules
    return primitive.name in _STAGED_PLAINLY if is_staged else primitive.name != "custom_lin"


def jit_once(fn: Function) -> Function:
    """Make `jax.jit(fn)`, whose call in a program appends an equation that was traced before.

    A call of a jitted function in a program takes as long as ten other equations.
    """
    jitted = typed.jit(fn)

    @functools.lru_cache(maxsize=256)  # a context may refer to a model
    def trace_call(treedef: Any, types: tuple[Any, ...], context: Any) -> Any:
        del context  # types depend on the settings of JAX
        return _single_call(jitted, treedef.unflatten(types))

    def call(*args: Any) -> Any:
        if _current_trace() is None:
            return jitted(*args)
        leaves, treedef = jax.tree.flatten(args)
        eqn, structure = trace_call(treedef, tuple(map(jax.typeof, leaves)), trace_context())
        results = None if eqn is None else emit_equation(eqn, leaves, here=True)
        return jitted(*args) if results is None else structure.unflatten(results)

    return call


def _single_call(jitted: Function, types: Sequence[Any]) -> tuple[Equation | None, Any]:
    """Return the equation that calls a jitted function, if it is the whole program of the call."""
    jaxpr, results = typed.make_jaxpr(jitted, return_shape=True)(*types)
    inner = open_jaxpr(jaxpr)
    if len(inner.eqns) != 1 or jaxpr_consts(jaxpr):
        return None, None
    (eqn,) = inner.eqns
    is_whole = eqn.invars == inner.invars and eqn.outvars == inner.outvars
    return (eqn if is_whole else None), jax.tree.structure(results)
