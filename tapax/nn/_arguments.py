"""Checks of arguments that several functions of `tapax.nn` share: numbers and random keys."""

import math
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._sites import wrong_type


def check_members(number: Any) -> int:
    """Check a number of members; return it as an int."""
    try:
        members = operator.index(number)
    except TypeError:
        members = None
    if members is None or isinstance(number, (bool, np.bool_)):
        raise wrong_type("`num_members` must be an integer, but is", number)
    if members < 1:
        raise ValueError(f"`num_members` must be 1 or more, but is {members}.")
    return members


def check_number(number: Any, name: str) -> float:
    """Check a finite real number; return it as a float."""
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise wrong_type(f"`{name}` must be a number, but is", number)
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be finite, but is {number}.")
    return float(number)


def check_deviation(number: Any, name: str) -> float:
    """Check a standard deviation; return it as a float."""
    deviation = check_number(number, name)
    if deviation < 0:
        raise ValueError(
            f"`{name}` is a standard deviation and cannot be negative, but is {number}."
        )
    return deviation


def check_key(key: Any) -> jax.Array:
    """Check one random key; return it as a typed key."""
    if key is None:
        raise TypeError("`key` must be given, to draw the members: key=jax.random.key(0).")
    if isinstance(key, (jax.Array, np.ndarray)):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
            return jnp.asarray(key)
        if key.dtype == jnp.uint32 and key.ndim == 1:
            return jax.random.wrap_key_data(jnp.asarray(key))
    raise wrong_type("`key` must be one random key, such as jax.random.key(0), but is", key)
