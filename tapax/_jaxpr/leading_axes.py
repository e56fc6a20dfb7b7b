"""Functions and masks over leading axes: those of maps, loops and meshes before a value's axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._jax import Value, typed


def vmapped(fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Apply `jax.vmap` to `fn` as many `times`, for values with as many leading axes."""
    for _ in range(times):
        fn = jax.vmap(fn)
    return fn


def where(mask: Value, x: Value, y: Value) -> Value:
    """Choose `x` where `mask` is true, else `y`; the axes of `mask` are the leading axes of `x`."""
    return jnp.where(_jax.spread(align(mask, x.ndim), x), x, y)


def align(mask: Value, ndim: int) -> Value:
    """Add trailing axes to `mask`, so that it broadcasts with an array of `ndim` dimensions."""
    mask = typed.asarray(mask).astype(bool)
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))
