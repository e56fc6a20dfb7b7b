"""Functions and masks over the axes of maps, loops and meshes, which lead those of a value."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def vmapped(fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A function of values with so many leading axes."""
    for _ in range(times):
        fn = jax.vmap(fn)
    return fn


def align(mask: Any, ndim: int) -> Any:
    """A mask with the leading axes of an array of `ndim`, to broadcast with it."""
    mask = jnp.asarray(mask).astype(bool)
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))
