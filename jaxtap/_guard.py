"""Conditionals under `vmap`, where the predicate is mapped.

`vmap` turns such a conditional into a selection: every branch runs for every example. So that a
site in a branch still says for which examples the branch counts, each tap in it is given the
condition as its `live` operand, before JAX batches the conditional.

The condition reaches the taps as accumulators reach the marks that fold: threaded through bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtap import _compat
from jaxtap._fold import Thread
from jaxtap._plan import Plan
from jaxtap._tap import tap_effect, tap_p
from jaxtap._walk import Walk

_NOTHING = Plan(None, None)
_THREADED = frozenset({"jit", "pjit", "scan", "cond", "while", "remat2", "remat", "checkpoint"})


class _Condition:
    """What is threaded through bodies in the place of folds: the condition itself."""

    def __init__(self, live: Any):
        self.items = live

    def enter(
        self, jaxprs: Sequence[Any], predicate: tuple[int, ...], scopes: Any
    ) -> tuple[Thread, ...]:
        del jaxprs, scopes
        if self.items.ndim < len(predicate):
            self.items = jnp.broadcast_to(self.items, predicate)
        return (Thread("live", flagged=False),)

    def arrays(self, threads: Sequence[Thread]) -> list[Any]:
        return [self.items for _ in threads]

    def restore(self, threads: Any, arrays: Sequence[Any], certain: Any = ()) -> None:
        del threads, certain
        (self.items,) = arrays

    def certain(self, threads: Sequence[Thread]) -> tuple[bool, ...]:
        return tuple(False for _ in threads)


class _Guard(Walk):
    """A walk that leaves taps where they are and gives each the condition."""

    def __init__(self, live: Any):
        super().__init__(_NOTHING)
        self.folds = _Condition(live)

    def _equation(self, eqn: Any, args: list[Any]) -> list[Any]:
        if eqn.primitive is tap_p:
            return self._tap(eqn, args)
        if tap_effect in eqn.effects and eqn.primitive.name in _THREADED:
            return super()._equation(eqn, args)
        return _compat.bind_equation(eqn, args)

    def _tap(self, eqn: Any, args: list[Any]) -> list[Any]:
        kind = eqn.params["kind"]
        if kind == "again":
            return _compat.bind_equation(eqn, args)
        own = 1 if kind == "value" else 2
        live = self.folds.items
        if len(args) > own:
            inner = args[own]
            live = live.reshape(live.shape + (1,) * (inner.ndim - live.ndim)) & inner
        return list(tap_p.bind(*args[:own], live, **eqn.params))


def _guarded(branch: Any, number: int) -> Any:
    """A branch that takes the index too, and tells its taps whether it is theirs."""

    def body(*args: Any) -> list[Any]:
        *operands, index = args
        return _Guard(index == number).run(branch, operands)

    avals = [v.aval for v in _compat.open_jaxpr(branch).invars]
    return jax.make_jaxpr(body)(*avals, jax.ShapeDtypeStruct((), jnp.int32))


def _batch_guarded(rule: Any) -> Any:
    def batch(axis_data: Any, args: Any, dims: Any, *, branches: Any, **params: Any) -> Any:
        if dims[0] is not None and any(tap_effect in b.effects for b in branches):
            branches = tuple(_guarded(b, i) for i, b in enumerate(branches))
            args, dims = [*args, args[0]], [*dims, dims[0]]
        return rule(axis_data, args, dims, branches=branches, **params)

    return batch


_compat.cond_batcher(_batch_guarded)
