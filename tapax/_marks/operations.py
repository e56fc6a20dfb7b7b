"""Marks on the results of operations that the rules `ops`, `lines` and `named` pick.

A result has a gradient only if it is marked before JAX differentiates the program. So tapax marks
the results as the user's code binds the operations. A bind inside another bind (a derivative rule)
or inside the evaluation of a jaxpr (a backward pass) is not an operation of the user.
"""

import contextlib
import itertools
import sys
import threading
from collections.abc import Generator
from typing import Any

import jax

from tapax import _jax
from tapax._jax import Args, Primitive, PyTree, Value
from tapax._jaxpr.kinds import CALLS, CUSTOM_RULES, Kind, kind_of_operation, kind_of_primitive
from tapax._marks.context import MarkingPolicy, active_policy, set_policy
from tapax._marks.source_folders import JAX_FOLDER, TAPAX_FOLDER
from tapax._marks.tap import Mark, tap, tap_p
from tapax._sites import Operation

_thread = threading.local()


@contextlib.contextmanager
def with_marks(policy: MarkingPolicy) -> Generator[None]:
    """Switch marks on within the context, and mark the results that the rules of `policy` pick."""
    outer = active_policy()
    here = policy if outer is None else policy | outer
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_policy(here))
        if here.rules and not (outer and outer.rules):
            stack.enter_context(_jax.intercept_bind(_mark_operation))
        yield


_TRACING = CUSTOM_RULES | Kind.SHARD_MAP
"""Primitives that trace the user's function while they are bound; `jit` traces before."""


@contextlib.contextmanager
def internal_operations() -> Generator[None]:
    """Keep rules from marking operations within the context, as they are not the user's."""
    before = getattr(_thread, "binding", False)
    _thread.binding = True
    try:
        yield
    finally:
        _thread.binding = before


def _mark_operation(bind: Any, primitive: Primitive, args: Args, params: PyTree) -> Any:
    here = active_policy()
    if primitive is tap_p:
        # Evaluating a tap eagerly binds operations, which are not the user's.
        with internal_operations():
            return bind(primitive, *args, **params)
    if here is None or getattr(_thread, "binding", False):
        return bind(primitive, *args, **params)
    source = _user_line()
    tracing = bool(kind_of_primitive(primitive) & _TRACING)
    with contextlib.nullcontext() if tracing else internal_operations():
        out = bind(primitive, *args, **params)
    if source is None:
        return out
    op, label = _jax.operation(primitive, params)
    is_call = bool(kind_of_operation(primitive, params) & (CALLS | CUSTOM_RULES))
    if not any(rule.marks(Operation(op, source, label, is_call)) for rule in here.rules):
        return out
    path, kind = (label, "name") if label else (op, "op")
    several = primitive.multiple_results and len(list(out)) > 1
    numbers = itertools.count()

    def marked(x: Value) -> Any:
        name = f"{path}:{next(numbers)}" if several else path
        if not isinstance(x, jax.Array):
            return x
        return tap(x, Mark(name, kind, source, op=op, **here.on_marks))

    return _jax.map_results(marked, out, primitive)


def _user_line() -> str | None:
    """Return `file:line` of the user's code that binds an operation; None if JAX binds it."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(JAX_FOLDER):
            if code.co_name == "eval_jaxpr" or code.co_name.startswith("backward_pass"):
                return None
        elif not code.co_filename.startswith(TAPAX_FOLDER):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
