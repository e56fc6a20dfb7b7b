"""Guards that keep a program running when it raises at a bad value, so that a search can find it.

`equinox.error_if`, which diffrax, lineax and optimistix use, raises from a callback.
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
"""A part of every cache key, so that no other run reuses a trace of a guarded run."""
_lock = threading.Lock()


class _State:
    """The state of the guarded run, of which there is one at a time: has a callback raised?"""

    raised = False


@contextlib.contextmanager
def guarded_run() -> Iterator[None]:
    """Keep programs from raising: a callback that would raise, and all later ones, return NaNs.

    The first fault is then a bad value before the callback, or else the callback itself. A callback
    without a result that can be NaN still raises. This context guards the callbacks of primitives
    that other libraries define, when JAX compiles them; `guard_callbacks` guards the callbacks of a
    program.
    """
    with _lock, _guarding(True), _jax.intercept_bind(_guard_bind):
        _State.raised = False
        yield


def guard_callbacks(jaxpr: Jaxpr) -> Jaxpr:
    """Guard the callbacks of a program, so that they return NaNs in a guarded run."""

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
