"""A kernel for NVIDIA GPUs that computes all statistics of a value in one read.

Each lane of a program adds its elements to counts of four bits, eight to a word, in registers. The
lane adds each of these counts to a count of eight bits before it can exceed fifteen. A program sums
the counts of its lanes, in sixteen bits, when it ends, and XLA sums the counts of the programs.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax._jax import Value

_LANES, _WARPS = 256, 4
_MOST_LOADS = 56
"""The most words that a lane loads: with two elements in a word, no 8-bit count overflows."""

_PROGRAMS = 528
"""The least number of programs for a large value: four for each multiprocessor of a large GPU."""

_FIELDS, _BITS = 8, 4
_FEW = 2**16
"""The number of elements below which launching the kernel costs more than it saves."""

_INFINITE = np.uint32(0x7F800000)
"""The bits of infinity in float32; the bits of NaN are larger integers."""


class Statistics(NamedTuple):
    """The statistics from one read of a value; with `only_counts`, all but `counts` are None."""

    counts: Any
    nonfinite: Any = None
    squares: Any = None
    ends: Any = None


class _Options(NamedTuple):
    """The static arguments of the kernel."""

    size: int
    each: int
    loads: int
    first: int
    bins: int
    scales: tuple[float, float]
    only_counts: bool

    @property
    def step(self) -> int:
        """The number of words that a lane may load before a count of four bits overflows."""
        return (2**_BITS - 1) // self.each

    @property
    def words(self) -> int:
        """The number of words that the counts of four bits take; infinities have the last one."""
        return math.ceil((self.bins + (not self.only_counts)) / _FIELDS)


def is_for(x: Value, powers: tuple[int, int]) -> bool:
    """Return whether the kernel supports the value `x` and counts between two powers of two."""
    low, high = powers
    return (
        x.dtype in (jnp.bfloat16, jnp.float32)
        and _FEW <= x.size < 2**31 - 2**16  # so that no index overflows
        and x.size * x.dtype.itemsize % 4 == 0
        and -126 <= low < high <= 128
    )


def run(
    x: Value, powers: tuple[int, int], scales: tuple[float, float], *, only_counts: bool
) -> Statistics:
    """Run the kernel, which counts magnitudes between the powers of two `powers`.

    `scales` are the factors by which the two sums of squares multiply the elements.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    each = 4 // x.dtype.itemsize
    flat = x.reshape(-1, each) if each > 1 else x.ravel()
    words = lax.bitcast_convert_type(flat, jnp.uint32)
    low, high = powers
    options = _Options(words.size, each, 0, low + 127, high - low + 2, scales, only_counts)
    loads = words.size // (_LANES * _PROGRAMS) // options.step * options.step
    options = options._replace(
        loads=min(max(loads, options.step), _MOST_LOADS // options.step * options.step)
    )
    programs = math.ceil(words.size / (_LANES * options.loads))
    counts = options.words * _FIELDS // 2
    shapes = [(counts, jnp.int32), *([] if only_counts else [(4, jnp.float32)])]
    outs = pl.pallas_call(
        functools.partial(_kernel, options=options),
        grid=(programs,),
        out_shape=[jax.ShapeDtypeStruct((programs, n), dtype) for n, dtype in shapes],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2),
        name="tapax_statistics",
    )(words)
    packed = outs[0].astype(jnp.uint32)
    shifts = np.asarray([0, 16], np.uint32).reshape(2, 1, 1)
    halves = (packed >> shifts & np.uint32(2**16 - 1)).sum(1, dtype=jnp.uint32)
    # The halves of a word are four bins apart.
    fields = halves.reshape(2, -1, _FIELDS // 2).swapaxes(0, 1).ravel()
    # The kernel reads zeros past the end of the value.
    missing = np.zeros(options.bins, np.uint32)
    missing[0] = (programs * _LANES * options.loads - options.size) * each
    bins = fields[: options.bins] - missing
    if only_counts:
        return Statistics(bins)
    infinite, sums = fields[options.bins], outs[1]
    nans = np.uint32(x.size) - bins.sum(dtype=jnp.uint32) - infinite
    ends = tuple(jnp.where(nans > 0, jnp.nan, end) for end in (sums[:, 2].min(), sums[:, 3].max()))
    # The last bin reaches to infinity.
    bins += infinite * np.eye(1, options.bins, options.bins - 1, dtype=np.uint32)[0]
    return Statistics(bins, nans + infinite, sums[:, :2].sum(0), ends)


class _Found(NamedTuple):
    """The statistics of the lanes of a program, except the counts."""

    up: Any
    down: Any
    low: Any
    high: Any


def _kernel(words: Any, counts: Any, sums: Any = None, *, options: _Options) -> None:
    from jax.experimental import pallas as pl

    program = pl.program_id(0)
    # Only the last program may reach past the end of the value. The others need not check.
    is_whole = (program + 1) * np.int32(options.loads * _LANES) <= options.size
    wide, found = lax.cond(
        is_whole,
        lambda: _read(words, program, options, is_whole=True),
        lambda: _read(words, program, options, is_whole=False),
    )
    mask = np.uint32(2**8 - 1 + (2**8 - 1 << 16))
    for i in range(options.words):
        for j in range(_FIELDS // 2):
            pair = wide[2 * i + j % 2] >> np.uint32(j // 2 * 8) & mask
            counts[program, i * _FIELDS // 2 + j] = jnp.sum(pair.astype(jnp.int32))
    if found is not None:
        totals = jnp.sum(found.up), jnp.sum(found.down), jnp.min(found.low), jnp.max(found.high)
        for i, total in enumerate(totals):
            sums[program, i] = total


def _read(words: Any, program: Any, options: _Options, *, is_whole: bool) -> Any:
    """Read the words of a program; return the counts of its lanes and their other statistics.

    The first of two words of counts has every second count of a word of four bits, from the lowest
    on, and the second word has the others.
    """
    first = program * np.int32(options.loads * _LANES) + jnp.arange(_LANES, dtype=jnp.int32)
    nothing = jnp.zeros(_LANES, jnp.uint32)
    mask = np.uint32(0x0F0F0F0F)

    def load_some(number: Any, carry: Any) -> Any:
        """Add as many elements as fit into a count of four bits."""
        wide, found = carry
        packed = [nothing] * options.words
        for i in range(options.step):
            at = first + (number * options.step + i) * _LANES
            is_there = None if is_whole else at < options.size
            if is_there is None:
                loaded = words[at]
            else:
                loaded = jnp.where(is_there, words[jnp.minimum(at, options.size - 1)], nothing)
            for bits in _elements(loaded, options.each):
                packed = _count(packed, bits, options)
                if found is not None:
                    found = _add(found, bits, is_there, options)
        parts = [p >> np.uint32(shift) & mask for p in packed for shift in (0, _BITS)]
        return [w + p for w, p in zip(wide, parts, strict=True)], found

    zero = jnp.zeros(_LANES, jnp.float32)
    infinite = zero + np.float32(np.inf)
    start = None if options.only_counts else _Found(zero, zero, infinite, -infinite)
    wide = [nothing] * (2 * options.words)
    return lax.fori_loop(0, options.loads // options.step, load_some, (wide, start))


def _elements(words: Any, each: int) -> list[Any]:
    """Unpack the elements of words, as the bits of float32."""
    if each == 1:
        return [words]
    return [words & np.uint32(0xFFFF0000), words << np.uint32(16)]


def _count(packed: Sequence[Any], bits: Any, options: _Options) -> list[Any]:
    """Add one element of each lane to packed counts, which leave out NaN."""
    magnitude = bits & np.uint32(0x7FFFFFFF)
    exponent = (magnitude >> np.uint32(23)).astype(jnp.int32)
    place = jnp.clip(exponent + np.int32(1 - options.first), 0, options.bins - 1)
    if not options.only_counts:
        place = jnp.where(magnitude == _INFINITE, np.int32(options.bins), place)
    one = np.uint32(1) << ((place & (_FIELDS - 1)) * _BITS).astype(jnp.uint32)
    one = jnp.where(magnitude > _INFINITE, np.uint32(0), one)
    word = place >> int(math.log2(_FIELDS))
    return [p + jnp.where(word == k, one, np.uint32(0)) for k, p in enumerate(packed)]


def _add(found: _Found, bits: Any, is_there: Any, options: _Options) -> _Found:
    """Add one element of each lane to the other statistics, if it `is_there`."""
    x = lax.bitcast_convert_type(bits, jnp.float32)
    up, down = (x * np.float32(scale) for scale in options.scales)
    low, high = jnp.minimum(found.low, x), jnp.maximum(found.high, x)
    if is_there is not None:
        low, high = jnp.where(is_there, low, found.low), jnp.where(is_there, high, found.high)
    return _Found(found.up + up * up, found.down + down * down, low, high)
