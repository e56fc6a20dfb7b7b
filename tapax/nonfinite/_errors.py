"""Programs that raise at a bad value, made to go on, so that the value can be searched for.

`equinox.error_if`, and with it diffrax, lineax and optimistix, raise from a callback.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tapax import _jax
from tapax._jax import AbstractValue, Args, Atom, Equation, Jaxpr, Kwargs, Primitive, Value, Var
from tapax._jaxpr.kinds import Kind, kind_of, kind_of_primitive
from tapax._jaxpr.rewrite import map_bodies, map_equation_bodies, rewrite
from tapax._marks.context import ContextVariable
from tapax.nonfinite._equation_numbers import is_inexact

_guarding = ContextVariable[bool](False)
"""A part of the key of every cache: what is traced in a guarded run is not used in another."""
_lock = threading.Lock()


class _State:
    """Whether a callback of the guarded run has raised. There is one guarded run at a time."""

    raised = False


@contextlib.contextmanager
def guarded_run() -> Iterator[None]:
    """Within, programs do not raise: a callback that would, and all after it, return NaNs instead.

    So what went wrong first is a bad value before the callback, or else the callback itself. One
    that returns no number that can be NaN raises as before. Callbacks of primitives that another
    library defines are guarded when these are compiled, those of a program by `guard_callbacks`.
    """
    with _lock, _guarding(True), _jax.intercept_bind(_guard_bind):
        _State.raised = False
        yield


def guard_callbacks(jaxpr: Jaxpr) -> Jaxpr:
    """The program with its callbacks guarded."""

    def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
        del names
        if kind_of(eqn) & Kind.CALLBACK:
            yield eqn.replace(params=_guarded(eqn.params, [v.aval for v in eqn.outvars]))
        else:
            yield map_equation_bodies(eqn, guard_body)

    def guard_body(body: Jaxpr) -> Jaxpr:
        return rewrite(body, visit)

    return map_bodies(jaxpr, guard_body)


def _guard_bind(bind: Any, primitive: Primitive, args: Args, params: Kwargs) -> Any:
    if _guarding.value and kind_of_primitive(primitive) & Kind.CALLBACK:
        params = _guarded(params, params.get("result_avals", ()))
    return bind(primitive, *args, **params)


def _guarded(params: Kwargs, types: Sequence[AbstractValue]) -> Kwargs:
    callback = params.get("callback")
    if not callable(callback) or isinstance(callback, _GuardedCallback):
        return params
    if not any(map(is_inexact, types)):
        return params
    return {**params, "callback": _GuardedCallback(callback, tuple(types))}


@dataclasses.dataclass(frozen=True)
class _GuardedCallback:
    callback: Callable[..., Any]
    types: Sequence[AbstractValue]

    def __call__(self, *args: Value) -> Any:
        if not _State.raised:
            try:
                return self.callback(*args)
            except Exception:
                _State.raised = True
        return [
            np.full(t.shape, np.nan if jnp.issubdtype(t.dtype, jnp.inexact) else 0, t.dtype)
            for t in self.types
        ]
