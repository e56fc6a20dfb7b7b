"""The handlers of functions with custom derivative rules."""

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

_RULE = "a function with a custom derivative rule (jax.custom_jvp or jax.custom_vjp)"


def walk_custom_jvp(walk: Interpreter, eqn: Equation, args: list[Any]) -> list[Any]:
    """Walk the body of a `custom_jvp`; its custom rule differentiates the results.

    In a derivative the values of the results come from the rule too, as it may compute them by
    other code; but not if the body is edited.
    """
    staged, inner, edited = _staged(walk, eqn, args)
    threads, count, n = staged.threads, staged.count, len(staged.ins.kept)

    @jax.custom_jvp
    def call(*flat: Value) -> list[Any]:
        return inner(*flat)

    def rule(primals: PyTree, tangents: PyTree) -> Any:
        moves = [type(t) is not SymbolicZero for t in tangents]
        _refuse_derivatives(threads, moves, edited)
        if edited:
            walk.hooks.differentiate_edited(walk, edited)
        moved = list(itertools.compress(range(len(primals)), moves))
        moving = [tangents[i] for i in moved]
        moved_operands = [i for i in moved if i < n]
        directions = moving[: len(moved_operands)]
        values, out = derivatives.jvp(_plain(eqn), primals[:n], moved_operands, directions)
        results, inside = derivatives.jvp(inner, primals, moved, moving)
        chosen = results[:count] if edited else values
        return [*chosen, *results[count:]], [*out, *inside[count:]]

    call.defjvp(rule, symbolic_zeros=True)
    return walk.unstage(staged, call(*walk.operands(staged, args)[0]))


def walk_custom_vjp(walk: Interpreter, eqn: Equation, args: list[Any]) -> list[Any]:
    """Walk the body of a `custom_vjp`: its rule differentiates the results, and JAX the entries."""
    staged, inner, edited = _staged(walk, eqn, args)
    threads, count, n = staged.threads, staged.count, len(staged.ins.kept)

    @typed.custom_vjp
    def call(*flat: Value) -> list[Any]:
        return inner(*flat)

    def forward(*given: Any) -> Any:
        moves = [x.perturbed for x in given]
        _refuse_derivatives(threads, moves, edited)
        if edited:
            walk.hooks.differentiate_edited(walk, edited)
        flat = [x.value for x in given]
        moved = list(itertools.compress(range(len(flat)), moves))
        # JAX raises if one of them is a value that the function closes over.
        moved_operands = [i for i in moved if i < n]
        out, back = derivatives.vjp(_plain(eqn), flat[:n], moved_operands)

        def split(*flat: Value) -> Any:
            results = inner(*flat)
            return results[count:], results[:count]

        inside, back_inside, results = derivatives.vjp(split, flat, moved, has_aux=True)
        residuals = back, back_inside, Static((moved_operands, moved))
        return [*(results if edited else out), *inside], residuals

    def backward(residuals: PyTree, cts: PyTree) -> Any:
        back, back_inside, numbers = residuals
        moved_operands, moved = numbers.value
        cts = [derivatives.instantiate(ct) for ct in cts]
        summed: list[Any] = [None] * len(staged.jaxpr.in_avals)
        for i, ct in zip(moved, back_inside(list(cts[count:])), strict=True):
            summed[i] = ct
        for i, ct in zip(moved_operands, back(list(cts[:count])), strict=True):
            summed[i] = ct + summed[i]
        return tuple(summed)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return walk.unstage(staged, call(*walk.operands(staged, args)[0]))


def _staged(
    walk: Interpreter, eqn: Equation, args: list[Any]
) -> tuple[StagedBody, Callable[..., Any], Sequence[Key]]:
    """Stage the body of a call; return it, a function that evaluates it, and the edits inside."""
    body, changes_met_in = _jax.call_body(eqn), walk.changes.recorder()
    staged = walk.stage(body, args, shield=_RULE)
    return staged, _jax.as_function(staged.jaxpr), changes_met_in(body)


def _plain(eqn: Equation) -> Callable[..., Any]:
    """Return a function that binds a call unchanged, with its rule and without marks."""

    def call(*flat: Value) -> Any:
        with without_marks():
            return _jax.bind_equation(eqn, flat)

    return call


def _refuse_derivatives(threads: Threads, moves: Sequence[bool], edited: Sequence[Key]) -> None:
    """Raise for a derivative with respect to a part of a change, which the custom rule ignores."""
    count = len(threads.parts)
    for key, moved in zip(threads.parts, moves[len(moves) - count :], strict=True):
        if moved and isinstance(key, PartKey) and key.change in edited:
            raise SiteError(
                f"The site {key.change.name!r} is inside {_RULE}, so there is no derivative with "
                "respect to its perturbation or replacement. Mark a value outside of that function."
            )
