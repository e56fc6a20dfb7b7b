"""The handlers of functions with a derivative rule of their own."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from tapax import _jax
from tapax._jax import Equation, PyTree, Static, Value, typed
from tapax._jaxpr import derivatives
from tapax._marks.context import without_marks
from tapax._sites import SiteError
from tapax._walk.changes import Key, PartKey
from tapax._walk.entries import StagedBody, Threads
from tapax._walk.interpreter import Interpreter

_RULE = "a function with a derivative rule of its own (jax.custom_jvp or jax.custom_vjp)"


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
        moves = [type(t) is not SymbolicZero for t in tangents]
        _refuse_derivatives(threads, moves)
        if edited:
            walk.hooks.differentiate_edited(walk, edited)
        moved = list(itertools.compress(range(len(primals)), moves))
        moving = [tangents[i] for i in moved]
        own = [i for i in moved if i < n]
        values, out = derivatives.jvp(_plain(eqn), primals[:n], own, moving[: len(own)])
        results, inside = derivatives.jvp(inner, primals, moved, moving)
        chosen = results[:count] if edited else values
        return [*chosen, *results[count:]], [*out, *inside[count:]]

    call.defjvp(rule, symbolic_zeros=True)
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
        moves = [x.perturbed for x in given]
        _refuse_derivatives(threads, moves)
        if edited:
            walk.hooks.differentiate_edited(walk, edited)
        flat = [x.value for x in given]
        moved = list(itertools.compress(range(len(flat)), moves))
        own = [i for i in moved if fixed <= i < n]
        out, back = derivatives.vjp(_plain(eqn), flat[:n], own)

        def split(*flat: Value) -> Any:
            results = inner(*flat)
            return results[count:], results[:count]

        inside, back_inside, results = derivatives.vjp(split, flat, moved, has_aux=True)
        residuals = back, back_inside, Static((own, moved))
        return [*(results if edited else out), *inside], residuals

    def backward(residuals: PyTree, cts: PyTree) -> Any:
        back, back_inside, places = residuals
        own, moved = places.value
        cts = [derivatives.instantiate(ct) for ct in cts]
        summed: list[Any] = [None] * len(staged.jaxpr.in_avals)
        for i, ct in zip(moved, back_inside(list(cts[count:])), strict=True):
            summed[i] = ct
        for i, ct in zip(own, back(list(cts[:count])), strict=True):
            summed[i] = ct + summed[i]
        return tuple(summed)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return walk.unstage(staged, call(*walk.operands(staged, args)[0]))


def _staged(
    walk: Interpreter, eqn: Equation, args: list[Any]
) -> tuple[StagedBody, Callable[..., Any], Sequence[Key]]:
    """The body of a call, staged, as a function too; and what is edited in it."""
    body = _jax.call_body(eqn)
    staged = walk.stage(body, args, shield=_RULE)
    return staged, _jax.as_function(staged.jaxpr), walk.changes.within(body)


def _plain(eqn: Equation) -> Callable[..., Any]:
    """A call as it stands, with its own rule and without marks."""

    def call(*flat: Value) -> Any:
        with without_marks():
            return _jax.bind_equation(eqn, flat)

    return call


def _refuse_derivatives(threads: Threads, moves: Sequence[bool]) -> None:
    """The derivative of a call is its own rule's, which knows nothing of what an edit is given."""
    count = len(threads.parts)
    for key, moved in zip(threads.parts, moves[len(moves) - count :], strict=True):
        if moved and isinstance(key, PartKey):
            raise SiteError(
                f"The site {key.change.name!r} is inside {_RULE}, so there is no derivative by "
                "what it is perturbed or replaced with. Mark a value outside of that function."
            )
