"""Equations: their evaluation, and the names, lines and transformations of their trace."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax._src import source_info_util as _source_info
from jax.extend.core import Primitive

from tapax._jax.types import Equation, PyTree


def map_results(fn: Callable[[Any], Any], out: PyTree, primitive: Primitive) -> Any:
    """Apply `fn` to every result in `out`, which binding `primitive` returned.

    A `shard_map` may return its results in a container of JAX that is not a list.
    """
    if not primitive.multiple_results:
        return fn(out)
    return [fn(x) for x in out] if isinstance(out, (list, tuple)) else out.map(fn)


def in_context(eqn: Equation, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` under the name stack, the source line and the settings of an equation."""
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        return fn(*args)


def names_of(eqn: Equation) -> Iterator[str]:
    """Return the names in the name stack of an equation, outermost first."""
    return (part.name for part in eqn.source_info.name_stack.stack)


def transforms_of(eqn: Equation) -> set[str]:
    """Return the transformations that produced an equation: `jvp`, `transpose`, `vmap`."""
    parts = eqn.source_info.name_stack.stack
    return {part.name for part in parts if type(part).__name__ == "Transform"}


def passes_of(eqn: Equation) -> tuple[bool, ...]:
    """Return, for each derivative that contains an equation, whether it is in the backward pass.

    The derivatives are in order, outermost first.
    """
    found: list[bool] = []
    transposed = False
    for part in eqn.source_info.name_stack.stack:
        if type(part).__name__ != "Transform":
            continue
        if part.name == "jvp":
            found.append(transposed)
        # A linear function that is transposed without a derivative has no forward pass.
        transposed = part.name == "transpose"
    return tuple(found)


def lines_of(eqn: Equation) -> Iterator[tuple[str, int]]:
    """Yield the file and line of every stack frame of an equation's trace, innermost first."""
    traceback = eqn.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        yield frame.file_name, frame.line_num


def rename_scopes(eqn: Equation, rename: Callable[[str], str]) -> Any:
    """Apply `rename` to every name in the name stack of an equation."""
    stack = eqn.source_info.name_stack
    parts = tuple(part._replace(name=rename(part.name)) for part in stack.stack)
    info = eqn.source_info.replace(name_stack=dataclasses.replace(stack, stack=parts))
    return eqn.replace(source_info=info)


def no_names() -> contextlib.AbstractContextManager[Any]:
    """Start an empty name stack within the context."""
    return _source_info.reset_name_stack()


def implement_equation(eqn: Equation, args: Sequence[Any]) -> list[Any]:
    """Evaluate an equation with the Python implementation of its primitive; return a list."""
    out = eqn.primitive.impl(*args, **eqn.params)
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_equation(eqn: Equation, args: Sequence[Any]) -> list[Any]:
    """Bind an equation unchanged, with the operands `args`; return a list."""
    params = eqn.primitive.get_bind_params(eqn.params)
    out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]
