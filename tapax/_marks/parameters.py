"""Marks on parameters: the arrays that a program differentiates by.

`jax.grad(loss)(params)` differentiates by its arguments. A mark on a parameter before that is not a
part of the differentiated function, and meets no gradient. So the arguments are marked inside, as
if `loss` began with `params = sow(params)`: the cotangent of the mark is the gradient that
`jax.grad` returns. Whoever differentiates in JAX calls `jax.vjp`, which is wrapped for it while a
program is traced for a monitor of parameters.

No selection picks these marks, and no capture returns them: which argument of the program each one
is on is told by data flow, when the program is known.
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
    """The mark of an array by which a function is differentiated. It is not a site."""


_jax.cache_weakly(ParameterMark)


def mark_parameters(fn: Function) -> Function:
    """A function like `fn` that marks its arguments, by which it is differentiated, if asked to."""
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
