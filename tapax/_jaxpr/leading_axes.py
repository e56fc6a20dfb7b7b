"""Functions and masks over the axes of maps, loops and meshes, which lead those of a value."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._jax import Value, typed


def vmapped(fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A function of values with so many leading axes."""
    for _ in range(times):
        fn = jax.vmap(fn)
    return fn


def where(mask: Value, x: Value, y: Value) -> Value:
    """`x` where the mask, which has the leading axes of `x`, is true; `y` elsewhere."""
    return jnp.where(_jax.spread(align(mask, x.ndim), x), x, y)


def align(mask: Value, ndim: int) -> Value:
    """A mask with the leading axes of an array of `ndim`, to broadcast with it."""
    mask = typed.asarray(mask).astype(bool)
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))
