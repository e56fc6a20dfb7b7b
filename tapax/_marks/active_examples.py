"""The active examples in loops that a library runs until all examples are done.

`vmap` turns JAX's loops into such loops, and tapax passes the condition to the taps inside (see
`_walk.mapped_predicates`). A library may write such a loop by hand: it has one predicate for all
examples, and every example carries a flag that says whether it is done. An adapter then calls
`marks_count_where` while JAX traces the body of the loop.
"""

import contextlib
import threading
from collections.abc import Generator

from tapax._jax import Value
from tapax._marks.context import ContextVariable


class _Condition(threading.local):
    active: Value | None = None


_condition = _Condition()
# JAX must not reuse the trace of a jitted function from one body in another.
_body = ContextVariable[object | None](None)


@contextlib.contextmanager
def marks_count_where(active: Value) -> Generator[None]:
    """Let marks within the context count only for examples where the traced `active` is true."""
    outer = _condition.active
    _condition.active = active if outer is None else outer & active
    try:
        with _body(object()):
            yield
    finally:
        _condition.active = outer


def active_operands() -> list[Value]:
    """Return the operand `active` of a tap; an empty list if the mark counts for all examples."""
    return [] if _condition.active is None else [_condition.active]
