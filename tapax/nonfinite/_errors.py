"""Programs that raise at a bad value, made to go on, so that the value can be searched for.

`equinox.error_if`, and with it diffrax and optimistix, raise from a callback.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tapax._jax import AbstractValue, Atom, Equation, Jaxpr, Value, Var
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.rewrite import map_bodies, map_equation_bodies, rewrite
from tapax.nonfinite._equation_numbers import is_inexact


class ErrorGuard:
    """Keeps a program from raising: a callback that would, and all after it, return NaNs instead.

    So what went wrong first is a bad value before the callback, or else the callback itself. One
    that returns no number that can be NaN raises as before.
    """

    def __init__(self) -> None:
        self.raised = False

    def guard(self, jaxpr: Jaxpr) -> Jaxpr:
        """The program with its callbacks guarded."""

        def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
            del names
            callback, types = eqn.params.get("callback"), [v.aval for v in eqn.outvars]
            if kind_of(eqn) & Kind.CALLBACK and callable(callback) and any(map(is_inexact, types)):
                guarded = _GuardedCallback(self, callback, tuple(types))
                yield eqn.replace(params={**eqn.params, "callback": guarded})
            else:
                yield map_equation_bodies(eqn, guard_body)

        def guard_body(body: Jaxpr) -> Jaxpr:
            return rewrite(body, visit)

        return map_bodies(jaxpr, guard_body)


@dataclasses.dataclass(frozen=True)
class _GuardedCallback:
    guard: ErrorGuard
    callback: Callable[..., Any]
    types: Sequence[AbstractValue]

    def __call__(self, *args: Value) -> Any:
        if not self.guard.raised:
            try:
                return self.callback(*args)
            except Exception:
                self.guard.raised = True
        return [
            np.full(t.shape, np.nan if jnp.issubdtype(t.dtype, jnp.inexact) else 0, t.dtype)
            for t in self.types
        ]
