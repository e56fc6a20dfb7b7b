"""Conditionals and loops whose predicate `vmap` maps.

`vmap` turns a conditional whose predicate differs from example to example into a selection: every
branch runs for every example. A while loop runs for all examples until the last is done. To record
for which examples a site counts, the rules below give each tap in such a branch or body the
condition as its operand `active`, before JAX batches the equation. If the predicate turns out to be
equal for all examples, the tap drops the operand.

The walk threads the condition through bodies to the taps, as it threads folds.

JAX runs some while loops twice: to linearize them, and in the backward pass of remat. The last
rules keep the second run from marking values a second time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVarTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core.primitives import cond_p, while_p

from tapax import _jax
from tapax._jax import Equation, Jaxpr, PyTree, Static, Value, pytrees, typed
from tapax._jaxpr import derivatives
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.kinds import CALLS, LOOPS, Kind, kind_of
from tapax._marks.marked_jaxprs import TAPS, is_of_two, quieted, strip
from tapax._marks.tap import Mark, operands, tap_effect, tap_p
from tapax._marks.turns import Branch, branches_in_turn
from tapax._sites import SiteError
from tapax._walk.folds import FoldThread
from tapax._walk.interpreter import Interpreter, WalkHooks
from tapax._walk.plan import Plan
from tapax._walk.walk import Walk

Ts = TypeVarTuple("Ts")
_NOTHING = Plan(None, None)
_THREADED = CALLS | LOOPS | Kind.COND | Kind.REMAT


class _Condition:
    """The condition, which takes the place of folds as a thread through bodies."""

    def __init__(self, active: Value):
        self.items = active

    def enter(self, jaxprs: Any, scopes: Any, **options: Any) -> tuple[FoldThread, ...]:
        del jaxprs, scopes, options
        return (FoldThread(None, flagged=False),)

    def leave(self, threads: Any, jaxpr: Jaxpr, scopes: Any) -> tuple[FoldThread, ...]:
        del jaxpr, scopes
        return threads

    def arrays(self, threads: Sequence[FoldThread]) -> list[Any]:
        return [self.items for _ in threads]

    def restore(self, threads: Any, arrays: Sequence[Any], certain: Any = ()) -> None:
        del threads, certain
        (self.items,) = arrays

    def certain(self, threads: Sequence[FoldThread]) -> tuple[bool, ...]:
        return tuple(False for _ in threads)


class _Guard(WalkHooks):
    """Hooks that leave the taps in the program and give each the condition."""

    def __init__(self, branches: tuple[int, ...] = (), in_turn: Branch | None = None):
        self._numbers = branches
        self._in_turn = in_turn

    def run(self, active: Value, jaxpr: Jaxpr, args: Sequence[Value]) -> list[Value]:
        """Evaluate a program, and give each of its taps the condition `active`."""
        walk = Walk(_NOTHING, hooks=self)
        walk.nested = True
        walk.folds = _Condition(active)  # pyright: ignore[reportAttributeAccessIssue]
        return walk.run(jaxpr, args)

    def equation(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        kind = kind_of(eqn)
        has_taps = any(tap_effect in _jax.open_jaxpr(body).effects for body in bodies(eqn))
        if eqn.primitive is tap_p or (has_taps and kind & _THREADED):
            return walk.evaluate_equation(eqn, args)
        if not has_taps:
            return _jax.bind_equation(eqn, args)
        if kind in _CUSTOM:
            return _CUSTOM[kind](self, walk.folds.items, eqn, args)
        marks: list[Mark] = []
        strip(list(eqn.params.values()), marks)
        raise SiteError(
            f"The {marks[0].described}, is inside a call of {_jax.operation_name(eqn)!r}, in a "
            "conditional or a loop whose predicate differs from example to example under `vmap`, "
            "so tapax cannot tell for which examples it ran. Mark the value outside of that call."
        )

    def tap(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        count = operands(eqn.params["kind"], eqn.params["mark"])
        active: Value = walk.folds.items
        if len(args) > count:
            inner = args[count]
            active = active.reshape(active.shape + (1,) * (inner.ndim - active.ndim)) & inner
        branches = (*self._numbers, *eqn.params["branches"])
        turns = eqn.params["turns"]
        if self._in_turn is not None:
            turns = (self._in_turn.turn(), *turns)
        params = dict(eqn.params, branches=branches, turns=turns)
        return list(tap_p.bind(*args[:count], active, **params))

    def last_test(self, walk: Interpreter, record: Callable[[], None]) -> None:
        """Record nothing: the taps of a predicate stay in it."""

    def call(self, active: Value, fn: Callable[[*Ts], Any], *args: *Ts) -> Any:
        """Call `fn`, and give every tap inside of it the condition."""
        made, shape = typed.make_jaxpr(fn, return_shape=True)(*args)
        outs = self.run(active, made, jax.tree.leaves(args))
        return pytrees.structure(shape).unflatten(outs)


def _custom_jvp(guard: _Guard, active: Value, eqn: Equation, args: list[Value]) -> list[Value]:
    def plain(*flat: Value) -> list[Any]:
        return _jax.bind_equation(eqn, flat)

    @jax.custom_jvp
    def call(active: Value, *flat: Value) -> list[Any]:
        return guard.call(active, _jax.as_function(_jax.call_body(eqn)), *flat)

    def rule(primals: PyTree, tangents: PyTree) -> Any:
        active, *flat = primals
        moves = {i: t for i, t in enumerate(tangents[1:]) if type(t) is not SymbolicZero}
        by = functools.partial(derivatives.jvp, plain)
        return guard.call(active, lambda p, t: by(p, list(moves), t), flat, list(moves.values()))

    call.defjvp(rule, symbolic_zeros=True)
    return call(active, *args)


def _custom_vjp(guard: _Guard, active: Value, eqn: Equation, args: list[Value]) -> list[Value]:
    def plain(*flat: Value) -> list[Any]:
        return _jax.bind_equation(eqn, flat)

    @typed.custom_vjp
    def call(active: Value, *flat: Value) -> list[Any]:
        return guard.call(active, _jax.as_function(_jax.call_body(eqn)), *flat)

    def forward(active: Any, *given: Any) -> Any:
        flat = [x.value for x in given]
        moved = [i for i, x in enumerate(given) if x.perturbed]
        out, back = guard.call(
            active.value, lambda *flat: derivatives.vjp(plain, flat, moved), *flat
        )
        return out, (active.value, back, Static(moved))

    def backward(residuals: PyTree, cts: PyTree) -> Any:
        active, back, moved = residuals
        arrays = [derivatives.instantiate(ct) for ct in cts]
        found = guard.call(active, lambda back, cts: back(cts), back, arrays)
        by_number = dict(zip(moved.value, found, strict=True))
        return (None, *(by_number.get(i) for i in range(len(args))))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(active, *args)


_CUSTOM = {Kind.CUSTOM_JVP: _custom_jvp, Kind.CUSTOM_VJP: _custom_vjp}


def _in_branches(branches: Sequence[Any], index: Any) -> tuple[Any, ...]:
    """Make branches that also take the index, and give their taps the condition to be chosen.

    Those of a `lax.cond` also get their turn: see `_marks.turns`.
    """
    in_turn = branches_in_turn() if is_of_two(branches) else [None for _ in branches]

    def guarded(number: int, branch: Any) -> Any:
        def body(*args: Any) -> list[Any]:
            *values, index = args
            return _Guard((number,), in_turn[number]).run(index == number, branch, values)

        avals = [v.aval for v in _jax.open_jaxpr(branch).invars]
        return typed.make_jaxpr(body)(*avals, index)

    return tuple(guarded(i, branch) for i, branch in enumerate(branches))


def _batch_cond(rule: Any) -> Any:
    def batch(
        axis_data: Any, args: Sequence[Value], dims: Any, *, branches: Any, **params: Any
    ) -> Any:
        if dims[0] is not None and any(tap_effect in b.effects for b in branches):
            index = _jax.unmapped(args[0], dims[0])
            branches = _in_branches(branches, index)
            args, dims = [*args, args[0]], [*dims, dims[0]]
        args = _shard_tokens(axis_data, args, dims)
        return rule(axis_data, args, dims, branches=branches, **params)

    return batch


def _shard_tokens(axis_data: Any, args: Sequence[Value], dims: Sequence[Any]) -> list[Value]:
    """Shard the mapped axis of tokens over an explicit mesh.

    A token has no elements, but JAX selects only among operands with equal shardings.
    """
    axis = axis_data.explicit_mesh_axis
    if axis is None:
        return list(args)

    def sharded(x: Value, dim: int | None) -> Value:
        if dim is None or x.size:
            return x
        spec = list(jax.typeof(x).sharding.spec)
        return _jax.with_spec(x, [*spec[:dim], axis, *spec[dim + 1 :]])

    return [sharded(x, dim) for x, dim in zip(args, dims, strict=True)]


def _batch_while(rule: Any) -> Any:
    def batch(axis_data: Any, args: Sequence[Value], dims: Any, **params: Any) -> Any:
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        count = params["cond_nconsts"]
        if tap_effect in body.effects:

            def guarded(*flat: Value) -> list[Any]:
                extra, rest = flat[:count], flat[count:]
                state = rest[params["body_nconsts"] :]
                (active,) = _jax.as_function(strip(test))(*extra, *state)
                return _Guard().run(active, body, rest)

            tested = [v.aval for v in _jax.open_jaxpr(test).invars[:count]]
            avals = [v.aval for v in _jax.open_jaxpr(body).invars]
            params = dict(
                params,
                body_jaxpr=typed.make_jaxpr(guarded)(*tested, *avals),
                body_nconsts=count + params["body_nconsts"],
            )
            args, dims = [*args[:count], *args], [*dims[:count], *dims]
        return rule(axis_data, args, dims, **params)

    return batch


def _split_while(rule: Any) -> Any:
    """Keep a loop that the backward pass of remat re-runs from marking values a second time."""

    def split(*args: Any) -> Any:
        known, staged, *rest = rule(*args)
        if known is not None and staged is not None and tap_effect in staged.effects:
            params = {k: quieted(v) for k, v in staged.params.items()}
            staged = staged.replace(params=params, effects=frozenset(staged.effects) - TAPS)
        return (known, staged, *rest)

    return split


@functools.cache
def register() -> None:
    """Wrap JAX's rules for conditionals and while loops, so that taps inside stay correct."""
    _jax.wrap_batcher(cond_p, _batch_cond)
    _jax.wrap_batcher(while_p, _batch_while)
    _jax.wrap_partial_eval_custom(while_p, _split_while)
    _jax.wrap_partial_eval(while_p, quieted)
