"""Marks on parameters: the arrays with respect to which a program differentiates.

`jax.grad(loss)(params)` differentiates with respect to its arguments. A mark on a parameter outside
of `loss` is not part of the differentiated function, and gets no gradient. So tapax marks the
arguments inside, as if `loss` began with `params = sow(params)`: the cotangent of that mark is the
gradient that `jax.grad` returns. Every reverse-mode derivative in JAX calls `jax.vjp`, which tapax
wraps while it traces a program for a monitor of parameters.

No selection picks these marks, and no capture returns them. Data flow in the traced program tells
to which argument each mark belongs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._jax import Function
from tapax._marks.context import active_policy
from tapax._marks.tap import Mark, tap


class ParameterMark(Mark):
    """The mark of a parameter, which is not a site."""


_jax.cache_weakly(ParameterMark)


def mark_parameters(fn: Function) -> Function:
    """Wrap `fn` so that it marks its arguments as parameters, if the active policy says so."""
    policy = active_policy()
    if policy is None or not policy.parameters:
        return fn

    @functools.wraps(fn)
    def marked(*primals: Any) -> Any:
        return fn(*jax.tree.map(_mark, primals))

    return marked


def _mark(x: Any) -> Any:
    if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return tap(x, ParameterMark("parameter", "closed", ""))
