"""Samples of a value: one of n neighbours, at places that a seed decides.

The neighbours are elements along one axis. Each index of the axes before it has a separate choice;
the sample includes all indices of the axes after it, so that memory is read in rows. The choice
depends only on the shape and the seed, so it does not differ between calls or with the number of
devices.
"""

import math
import numbers
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._jax import Value, whole

MOST = 2**16
"""The largest n of a sample of 1/n."""


def one_in(sample: Any, seed: Any) -> tuple[int, int]:
    """Return n for `sample=1/n`, and the seed, both checked."""
    given = float(sample) if isinstance(sample, numbers.Real) else math.nan
    share = Fraction(given).limit_denominator(MOST) if math.isfinite(given) else Fraction(0)
    if isinstance(sample, bool) or share.numerator != 1 or abs(float(share) - given) > 1e-9:
        raise ValueError(
            f"`sample` must be 1 or a fraction 1/n, with n up to {MOST}, but is {sample!r}: one of "
            "n elements is counted."
        )
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed` must be an integer from 0 to 2**32 - 1, but is {seed!r}.")
    return share.denominator, int(seed)


def take_sample(x: Value, each: int, seed: int) -> Any:
    """Take one of `each` neighbours of a value; the sampled axis is then split or shorter."""
    if each == 1 or not x.size:
        return x
    axis = _sampled_axis(x, each)
    if axis is None:
        x, axis = whole(x).ravel(), 0
    size = x.shape[axis]
    groups = max(size // each, 1)
    lead = x.shape[:axis]
    numbers = jnp.arange(math.prod(lead) * groups, dtype=jnp.uint32)
    chance = _mixed(numbers, seed).reshape(*lead, groups, *[1] * (x.ndim - axis - 1))
    if size % each == 0:
        # No group is split between two devices, if each device has a whole number of groups.
        x = x.reshape(*lead, groups, each, *x.shape[axis + 1 :])
        place = (chance % np.uint32(each)).astype(jnp.int32)
        return jnp.take_along_axis(x, jnp.expand_dims(place, axis + 1), axis + 1)
    starts = np.arange(groups + 1) * size // groups
    starts, lengths = starts[:-1], np.diff(starts)
    shape = (groups, *[1] * (x.ndim - axis - 1))
    place = chance % lengths.astype(np.uint32).reshape(shape)
    place = place.astype(jnp.int32) + starts.astype(np.int32).reshape(shape)
    return jnp.take_along_axis(x, place, axis)


def _sampled_axis(x: Value, each: int) -> int | None:
    """Choose the axis of the neighbours: the last but one, if it is long enough.

    Otherwise take an earlier axis, or the last one. Return None if no axis is long enough, apart
    from axes that are divided among devices.
    """
    spec = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)
    order = [*range(x.ndim - 2, -1, -1), *range(max(x.ndim - 1, 0), x.ndim)]
    return next((a for a in order if x.shape[a] >= each and spec[a] is None), None)


def _mixed(numbers: Value, seed: int) -> Any:
    """Hash each number to a random word: the finalizer of MurmurHash3 (Appleby 2011), twice."""
    for word in (np.uint32(seed), np.uint32(seed ^ 0x9E3779B9)):
        numbers = numbers ^ word
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            numbers = (numbers ^ (numbers >> np.uint32(shift))) * np.uint32(factor)
        numbers = numbers ^ (numbers >> np.uint32(16))
    return numbers
