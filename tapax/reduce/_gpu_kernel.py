"""A kernel for NVIDIA GPUs that computes all statistics of a value in one read.

Each lane of a program adds its elements to counts of four bits, eight to a word, in registers. The
lane adds each of these counts to a count of sixteen bits before it can exceed fifteen. A program
sums the counts of its lanes when it ends, and XLA sums the counts of the programs.
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
        """The number of words that the counts of four bits take."""
        return math.ceil(self.bins / _FIELDS)


def is_for(x: Value, powers: tuple[int, int]) -> bool:
    """Return whether the kernel supports the value `x` and counts between two powers of two."""
    low, high = powers
    return (
        x.dtype in (jnp.bfloat16, jnp.float32)
        and _FEW <= x.size < 2**31
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
    shapes = [(counts, jnp.int32)] if only_counts else [(counts + 1, jnp.int32), (4, jnp.float32)]
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
    bins = halves[:, :counts].reshape(2, -1, _FIELDS // 2).swapaxes(0, 1).ravel()[: options.bins]
    # The kernel reads zeros past the end of the value.
    missing = np.zeros(options.bins, np.uint32)
    missing[0] = (programs * _LANES * options.loads - options.size) * each
    if only_counts:
        return Statistics(bins - missing)
    sums = outs[1]
    is_nan = halves[0, -1] > 0
    ends = tuple(jnp.where(is_nan, jnp.nan, end) for end in (sums[:, 2].min(), sums[:, 3].max()))
    return Statistics(bins - missing, halves[1, -1], sums[:, :2].sum(0), ends)


class _Found(NamedTuple):
    """The statistics of the lanes of a program, except the counts of magnitudes."""

    odd: Any
    up: Any
    down: Any
    low: Any
    high: Any


def _kernel(words: Any, counts: Any, sums: Any = None, *, options: _Options) -> None:
    from jax.experimental import pallas as pl

    program = pl.program_id(0)
    lanes = jnp.arange(_LANES, dtype=jnp.int32)
    nothing = jnp.zeros(_LANES, jnp.uint32)

    def load_some(number: Any, carry: Any) -> Any:
        """Add as many elements as fit into a count of four bits."""
        wide, found = carry
        packed = [nothing] * options.words
        for i in range(options.step):
            at = (program * options.loads + number * options.step + i) * _LANES + lanes
            is_there = at < options.size
            loaded = jnp.where(is_there, words[jnp.minimum(at, options.size - 1)], np.uint32(0))
            for bits in _elements(loaded, options.each):
                packed = _count(packed, bits, options)
                if not options.only_counts:
                    found = _add(found, bits, is_there, options)
        mask = np.uint32((2**_BITS - 1) * (1 + 2**16))
        parts = [(p >> np.uint32(_BITS * i)) & mask for p in packed for i in range(_FIELDS // 2)]
        return [w + p for w, p in zip(wide, parts, strict=True)], found

    zero = jnp.zeros(_LANES, jnp.float32)
    infinite = zero + np.float32(np.inf)
    start = None if options.only_counts else _Found(nothing, zero, zero, infinite, -infinite)
    wide = [nothing] * (options.words * _FIELDS // 2)
    wide, found = lax.fori_loop(0, options.loads // options.step, load_some, (wide, start))
    for i, packed in enumerate(wide if found is None else [*wide, found.odd]):
        counts[program, i] = jnp.sum(packed.astype(jnp.int32))
    if found is not None:
        totals = jnp.sum(found.up), jnp.sum(found.down), jnp.min(found.low), jnp.max(found.high)
        for i, total in enumerate(totals):
            sums[program, i] = total


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
    one = np.uint32(1) << ((place & (_FIELDS - 1)) * _BITS).astype(jnp.uint32)
    one = jnp.where(magnitude > _INFINITE, np.uint32(0), one)
    word = place >> int(math.log2(_FIELDS))
    return [p + jnp.where(word == k, one, np.uint32(0)) for k, p in enumerate(packed)]


def _add(found: _Found, bits: Any, is_there: Any, options: _Options) -> _Found:
    """Add one element of each lane to the other statistics."""
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # The lower half counts NaNs, the upper half all elements that are not finite.
    odd = found.odd + jnp.where(magnitude > _INFINITE, np.uint32(1), np.uint32(0))
    odd = odd + jnp.where(magnitude >= _INFINITE, np.uint32(2**16), np.uint32(0))
    x = lax.bitcast_convert_type(bits, jnp.float32)
    up, down = (x * np.float32(scale) for scale in options.scales)
    return _Found(
        odd,
        found.up + up * up,
        found.down + down * down,
        jnp.where(is_there, jnp.minimum(found.low, x), found.low),
        jnp.where(is_there, jnp.maximum(found.high, x), found.high),
    )
