"""For which examples marks count, in loops that a library runs until all examples are done.

`vmap` turns JAX's own loops into such loops, and tapax gives their taps the condition (see
`_walk.mapped_predicates`). A library may do the same by hand: its loop has one predicate for all
examples, and every example carries whether it is done. Then an adapter says so while the body of
the loop is traced.
"""

import contextlib
import threading
from collections.abc import Generator

from tapax._jax import Value
from tapax._marks.context import ContextVariable


class _Condition(threading.local):
    live: Value | None = None


_condition = _Condition()
# A jitted function that is traced in one body must not be taken from the cache for another.
_body = ContextVariable[object | None](None)


@contextlib.contextmanager
def marks_count_where(live: Value) -> Generator[None]:
    """Within, marks count for the examples alone for which `live`, a traced boolean, is true."""
    outer = _condition.live
    _condition.live = live if outer is None else outer & live
    try:
        with _body(object()):
            yield
    finally:
        _condition.live = outer


def live_operands() -> list[Value]:
    """The condition under which a mark counts, an operand of its tap; none if it always does."""
    return [] if _condition.live is None else [_condition.live]
