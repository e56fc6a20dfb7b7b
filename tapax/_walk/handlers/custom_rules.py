"""The handlers of functions with a derivative rule of their own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0

from tapax import _jax
from tapax._jax import Equation, PyTree, Value, typed
from tapax._marks.context import without_marks
from tapax._sites import SiteError
from tapax._walk.changes import Key, PartKey
from tapax._walk.entries import StagedBody, Threads
from tapax._walk.interpreter import Interpreter


def walk_custom_jvp(walk: Interpreter, eqn: Equation, args: list[Any]) -> list[Any]:
    """The values come from the body; the derivative of its results is that of the custom rule.

    Where a derivative is taken, the values of the results are the rule's too, which may have code
    of its own for them; but not if the body is edited.
    """
    staged, inner, edited = _staged(walk, eqn, args)
    threads, count, n = staged.threads, staged.count, len(staged.ins.kept)

    @jax.custom_jvp
    def call(*flat: Value) -> list[Any]:
        return inner(*flat)

    def rule(primals: PyTree, tangents: PyTree) -> Any:
        _refuse_derivatives(threads, [type(t) is not SymbolicZero for t in tangents])
        if edited:
            walk.hooks.differentiate_edited(walk, edited)
        tangents = tuple(map(_instantiated, tangents))
        values, out = typed.jvp(_plain(eqn), primals[:n], tangents[:n])
        moving = len(primals) - len(threads.parts)
        parts = primals[moving:]
        results, inside = typed.jvp(
            lambda *flat: inner(*flat, *parts), primals[:moving], tangents[:moving]
        )
        own = results[:count] if edited else values
        return [*own, *results[count:]], [*out, *inside[count:]]

    call.defjvp(rule, symbolic_zeros=bool(threads.parts))
    return walk.unstage(staged, call(*walk.operands(staged, args)[0]))


def walk_custom_vjp(walk: Interpreter, eqn: Equation, args: list[Any]) -> list[Any]:
    """As for `custom_jvp`: what is recorded has its own derivative, the results the custom one."""
    staged, inner, edited = _staged(walk, eqn, args)
    threads, count, n = staged.threads, staged.count, len(staged.ins.kept)
    # By what the function closed over, which JAX puts first, it has no derivative.
    fixed = sum(i < eqn.params.get("num_consts", 0) for i in staged.ins.kept)

    @typed.custom_vjp
    def call(*flat: Value) -> list[Any]:
        return inner(*flat)

    def forward(*given: Any) -> Any:
        _refuse_derivatives(threads, [getattr(x, "perturbed", False) for x in given])
        if edited:
            walk.hooks.differentiate_edited(walk, edited)
        flat = [x.value if threads.parts else x for x in given]
        moving = len(flat) - len(threads.parts)

        def split(*moved: Value) -> Any:
            results = inner(*moved, *flat[moving:])
            return results[count:], results[:count]

        out, back = typed.vjp(functools.partial(_plain(eqn), *flat[:fixed]), *flat[fixed:n])
        inside, back_inside, own = typed.vjp(split, *flat[:moving], has_aux=True)
        return [*(own if edited else out), *inside], (back, back_inside)

    def backward(residuals: PyTree, cts: PyTree) -> Any:
        back, back_inside = residuals
        cts = [_instantiated(ct) for ct in cts]
        through, inside = back(list(cts[:count])), back_inside(list(cts[count:]))
        both = zip(through, inside[fixed:n], strict=True)
        summed = (a if a.dtype == float0 else a + b for a, b in both)
        return (*inside[:fixed], *summed, *inside[n:], *(None for _ in threads.parts))

    call.defvjp(forward, backward, symbolic_zeros=bool(threads.parts))
    return walk.unstage(staged, call(*walk.operands(staged, args)[0]))


def _staged(
    walk: Interpreter, eqn: Equation, args: list[Any]
) -> tuple[StagedBody, Callable[..., Any], Sequence[Key]]:
    """The body of a call, staged, as a function too; and what is edited in it."""
    body = _jax.call_body(eqn)
    staged = walk.stage(body, args)
    return staged, _jax.as_function(staged.jaxpr), walk.changes.within(body)


def _plain(eqn: Equation) -> Callable[..., Any]:
    """A call as it stands, with its own rule and without marks."""

    def call(*flat: Value) -> Any:
        with without_marks():
            return _jax.bind_equation(eqn, flat)

    return call


def _instantiated(t: Value) -> Any:
    """A tangent or cotangent as an array, also where JAX knows that it is zero."""
    if not isinstance(t, SymbolicZero):
        return t
    aval: Any = t.aval
    return np.zeros(aval.shape, aval.dtype) if aval.dtype == float0 else _jax.zeros(aval)


def _refuse_derivatives(threads: Threads, moves: Sequence[bool]) -> None:
    """The derivative of a call is its own rule's, which knows nothing of what an edit is given."""
    count = len(threads.parts)
    for key, moved in zip(threads.parts, moves[len(moves) - count :], strict=True):
        if moved and isinstance(key, PartKey):
            raise SiteError(
                f"The site {key.change.name!r} is inside a function with a derivative rule of its "
                "own (jax.custom_jvp or jax.custom_vjp), so there is no derivative by what it is "
                "perturbed or replaced with. Mark a value outside of that function."
            )
