"""Functions of JAX with complete types.

JAX's annotations name classes of jaxlib, which has no stubs, or leave out the return types. The
names below are JAX's functions themselves: a wrapper would add a frame to every traceback.
"""

from collections.abc import Callable
from typing import Any, Concatenate, TypeAlias

import jax
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from tapax._jax.types import Function

_OfArrays: TypeAlias = Callable[..., jax.Array]
_OfFunction: TypeAlias = Callable[Concatenate[Function, ...], Any]

arange: _OfArrays = jnp.arange
asarray: _OfArrays = jnp.asarray
ones: _OfArrays = jnp.ones
zeros: _OfArrays = jnp.zeros
zeros_like: _OfArrays = jnp.zeros_like

checkpoint: _OfFunction = jax.checkpoint
custom_linear_solve: _OfFunction = jax.lax.custom_linear_solve
custom_vjp: _OfFunction = jax.custom_vjp
eval_shape: _OfFunction = jax.eval_shape
jit: _OfFunction = jax.jit
jvp: _OfFunction = jax.jvp
lower_fun: _OfFunction = mlir.lower_fun
make_jaxpr: _OfFunction = jax.make_jaxpr
vjp: _OfFunction = jax.vjp

bdim_at_front: Function = batching.bdim_at_front
cond: Function = jax.lax.cond
with_sharding_constraint: Function = jax.lax.with_sharding_constraint
make_user_context: Function = jax.make_user_context
