"""Equations: how to evaluate one, and the names, lines and transformations it was traced under."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax._src import source_info_util as _source_info
from jax.extend.core import Primitive

from tapax._jax.types import Equation, PyTree


def map_results(fn: Callable[[Any], Any], out: PyTree, primitive: Primitive) -> Any:
    """What binding a primitive gave, with every result made another; a shard_map's are no list."""
    if not primitive.multiple_results:
        return fn(out)
    return [fn(x) for x in out] if isinstance(out, (list, tuple)) else out.map(fn)


def in_context(eqn: Equation, fn: Callable[..., Any], *args: Any) -> Any:
    """Calls `fn` under the name stack, the source line and the settings of an equation."""
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        return fn(*args)


def names_of(eqn: Equation) -> Iterator[str]:
    """The names in an equation's name stack, outermost first."""
    return (part.name for part in eqn.source_info.name_stack.stack)


def transforms_of(eqn: Equation) -> set[str]:
    """The transformations that made an equation: `jvp`, `transpose`, `vmap`."""
    parts = eqn.source_info.name_stack.stack
    return {part.name for part in parts if type(part).__name__ == "Transform"}


def passes_of(eqn: Equation) -> tuple[bool, ...]:
    """For each derivative that an equation is part of, outermost first: is it the backward pass?"""
    found: list[bool] = []
    transposed = False
    for part in eqn.source_info.name_stack.stack:
        if type(part).__name__ != "Transform":
            continue
        if part.name == "jvp":
            found.append(transposed)
        # What is transposed but no derivative, a linear function, has no forward pass.
        transposed = part.name == "transpose"
    return tuple(found)


def lines_of(eqn: Equation) -> Iterator[tuple[str, int]]:
    """The files and lines that an equation was traced from, innermost first."""
    traceback = eqn.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        yield frame.file_name, frame.line_num


def rename_scopes(eqn: Equation, rename: Callable[[str], str]) -> Any:
    """An equation with other names in its name stack."""
    stack = eqn.source_info.name_stack
    parts = tuple(part._replace(name=rename(part.name)) for part in stack.stack)
    info = eqn.source_info.replace(name_stack=dataclasses.replace(stack, stack=parts))
    return eqn.replace(source_info=info)


def no_names() -> contextlib.AbstractContextManager[Any]:
    """Within, the name stack starts anew."""
    return _source_info.reset_name_stack()


def implement_equation(eqn: Equation, args: Sequence[Any]) -> list[Any]:
    """Evaluates one equation by the function that its library evaluates the primitive with."""
    out = eqn.primitive.impl(*args, **eqn.params)
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_equation(eqn: Equation, args: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, just as it stands, on `args`; always returns a list."""
    params = eqn.primitive.get_bind_params(eqn.params)
    out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]
