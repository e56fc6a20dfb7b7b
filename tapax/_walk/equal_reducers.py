"""Whether two reducers do the same: a lambda is a new object each time it is evaluated."""

import functools
from typing import Any

from tapax._jax import Value
from tapax._marks.tap import Mark


def same_fold(a: Mark, b: Mark) -> bool:
    """Whether two marks fold alike."""
    return _same_function(a.reduce, b.reduce) and _same_function(a.init, b.init)


def _same_function(f: Any, g: Any) -> bool:
    """Whether two functions do the same: a lambda is a new object each time it is evaluated."""
    if f is g:
        return True
    if isinstance(f, functools.partial) and isinstance(g, functools.partial):
        return _same_function(f.func, g.func) and _equal((f.args, f.keywords), (g.args, g.keywords))
    if not (hasattr(f, "__code__") and hasattr(g, "__code__")):
        return f is not None and g is not None and _equal(f, g)
    return _same_code(f.__code__, g.__code__) and _equal(_bound_values(f), _bound_values(g))


def _bound_values(function: Any) -> Any:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return cells, function.__defaults__, function.__kwdefaults__


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are equal for sure: arrays are not compared."""
    try:
        return bool(a == b)
    except Exception:
        return False


def _same_code(a: Value, b: Value) -> bool:
    """Whether two code objects say the same, wherever they stand in the source."""
    if not (hasattr(a, "co_code") and hasattr(b, "co_code")):
        return type(a) is type(b) and a == b
    return (
        a.co_code == b.co_code
        and a.co_names == b.co_names
        and len(a.co_consts) == len(b.co_consts)
        and all(map(_same_code, a.co_consts, b.co_consts))
    )
