"""Marks on the results of operations that the rules `ops`, `lines` and `named` pick.

A result has a gradient only if it is marked before JAX differentiates the program. So tapax marks
the results as the user's code binds the operations. A bind inside another bind (a derivative rule)
or inside the evaluation of a jaxpr (a backward pass) is not an operation of the user. But inside of
both, JAX may call a custom rule, whose operations are the user's again.
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
    with _switched("is_internal", True):
        yield


@contextlib.contextmanager
def _switched(name: str, on: bool) -> Generator[None]:
    """Set a flag of this thread within the context."""
    before = getattr(_thread, name, False)
    setattr(_thread, name, on)
    try:
        yield
    finally:
        setattr(_thread, name, before)


def _mark_operation(bind: Any, primitive: Primitive, args: Args, params: PyTree) -> Any:
    here = active_policy()
    if here is None or getattr(_thread, "is_internal", False):
        return bind(primitive, *args, **params)
    is_inside = getattr(_thread, "is_binding", False)
    if kind_of_primitive(primitive) & _TRACING:
        with _switched("is_binding", False):
            out = bind(primitive, *args, **params)
    else:
        with _switched("is_binding", True):
            out = _bind_whole(bind, primitive, args, params)
    # Evaluating a tap eagerly binds operations too, but a tap is not an operation of the user.
    source = None if is_inside or primitive is tap_p else _user_line()
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


def _bind_whole(bind: Any, primitive: Primitive, args: Args, params: PyTree) -> Any:
    """Bind an operation whose own operations are not the user's; `_user_line` stops here."""
    return bind(primitive, *args, **params)


def _user_line() -> str | None:
    """Return `file:line` of the user's code that binds an operation; None if JAX binds it."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(JAX_FOLDER):
            if code.co_name == "eval_jaxpr" or code.co_name.startswith("backward_pass"):
                return None
        elif code is _bind_whole.__code__:
            return None
        elif not code.co_filename.startswith(TAPAX_FOLDER):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
