"""What the states of reducers are made of: sums in a type that is wide enough, and counts.

A count is an array of uint32, and stops at the largest number instead of starting from zero again.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax import _jax
from tapax._jax import PyTree, Value
from tapax.reduce._groups import reduce_groups

COUNT = jnp.dtype(jnp.uint32)
_MOST = np.uint32(2**32 - 1)


def wide(x: Value) -> Any:
    """A value in the type that it is accumulated in."""
    if x.dtype.itemsize >= 4:
        return x
    if x.dtype == jnp.bfloat16:
        return _widen_bfloat16(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float32)
    return x.astype(jnp.uint32 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else jnp.int32)


@jax.custom_jvp
def _widen_bfloat16(x: Value) -> Any:
    """Converts to float32 by the bits.

    XLA takes a float32 that was rounded to bfloat16 and converted back for the float32 itself. It
    would keep that, twice as large, where the program keeps the bfloat16.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << np.uint32(16), jnp.float32)


@_widen_bfloat16.defjvp
def _(primals: PyTree, tangents: PyTree) -> Any:
    return _widen_bfloat16(*primals), tangents[0].astype(jnp.float32)


def ordered(dtype: Any) -> Any:
    """The type in which values are compared: the smallest ones have no infinity."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1
    return jnp.dtype(jnp.float32 if small else dtype)


def square(x: Value) -> Any:
    """The square of the magnitude."""
    return jnp.real(x) ** 2 + jnp.imag(x) ** 2 if jnp.iscomplexobj(x) else jnp.square(x)


def scales(dtype: Any) -> tuple[float, float]:
    """The factors that make magnitudes larger, and smaller, before they are squared."""
    scale = 2.0 ** (jnp.finfo(dtype).maxexp * 25 // 64)
    return scale, 1 / scale


def _sum_squares(x: Value, *, axes: tuple[int, ...]) -> list[Any]:
    # On a CPU, XLA would broadcast a constant once for all sites and keep that, as large as a
    # value. The barrier gives every site constants of its own, which XLA broadcasts as it sums.
    factors = (np.asarray(scale, x.real.dtype) for scale in scales(x.dtype))
    x, *own = lax.optimization_barrier((x, *factors))
    return [square(x * scale).sum(axes, dtype=x.real.dtype) for scale in own]


def _sum_squares_in_one_read(x: Value, *, axes: tuple[int, ...]) -> list[Any]:
    # Of two sums XLA makes two kernels, each of which reads the value. What comes out of a barrier
    # it takes for one operand of all sites, whose reductions it would then merge.
    terms = [square(x * np.asarray(scale, x.real.dtype)) for scale in scales(x.dtype)]
    varying = _jax.varying_axes(jax.typeof(x))
    zeros = [_jax.with_varying(jnp.zeros((), term.dtype), varying) for term in terms]
    return list(lax.reduce(terms, zeros, lambda a, b: [a[0] + b[0], a[1] + b[1]], axes))


_bind_sum_squares = _jax.for_gpu("sum_squares", _sum_squares, _sum_squares_in_one_read)


def sum_squares(x: Value, axes: tuple[int, ...]) -> list[Any]:
    """The sums of the squares of the magnitudes made larger, and made smaller.

    The square of a vanishing gradient is zero, and that of an exploding one infinite, long before
    the gradient is. Between them these two have every magnitude from 1e-33 to 1e30 in float32.
    """
    return list(_bind_sum_squares(x, axes=axes))


def root(sums: Any, among: Any = 1) -> Any:
    """The root of the sum of squares, or of their mean `among` so many."""
    larger, smaller = sums
    up, down = (np.asarray(s, larger.dtype) for s in scales(larger.dtype))
    fits = larger < 2.0 ** (jnp.finfo(larger.dtype).maxexp * 7 // 8)
    found = jnp.sqrt(lax.select(fits, larger, smaller) / among)
    return found * lax.select(fits, jnp.full_like(found, down), jnp.full_like(found, up))


def all_but(x: Value, axis: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The axes of a value that are reduced, where `axis` is kept."""
    kept = () if axis is None else (axis,) if isinstance(axis, int) else axis
    rank = len(x.shape)
    return tuple(a for a in range(rank) if a not in {k % rank for k in kept})


def count(mask: Value, axes: tuple[int, ...] | None = None) -> Any:
    """How many are true."""
    return mask.sum(axes, dtype=COUNT)


def size(x: Value, axes: tuple[int, ...]) -> Any:
    """How many elements there are along some axes."""
    return jnp.asarray(min(math.prod(x.shape[a] for a in axes), int(_MOST)), COUNT)


def add(a: Value, b: Value) -> Any:
    """The sum of two states."""

    def one(x: Value, y: Value) -> Any:
        both = x + y
        return jnp.where(both < x, _MOST, both) if x.dtype == COUNT else both

    return jax.tree.map(one, a, b)


def add_all(states: Any) -> Any:
    """The sum of states that lie along the first axis."""

    def one(x: Value) -> Any:
        total = x.sum(0, dtype=x.dtype)
        if x.dtype != COUNT:
            return total
        return jnp.where(x.sum(0, dtype=jnp.float32) >= 2.0**32, _MOST, total)

    return jax.tree.map(one, states)


def as_integers(counts: Any) -> Any:
    """Counts as the integers that people compute with."""
    return jnp.minimum(counts, jnp.asarray(2**31 - 1, COUNT)).astype(jnp.int32)


def extremes(dtype: Any) -> tuple[Any, Any]:
    """The smallest and the largest number of a type."""
    if jnp.issubdtype(dtype, jnp.floating):
        ends = -np.inf, np.inf
    elif jnp.issubdtype(dtype, jnp.bool_):
        ends = False, True
    else:
        ends = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return np.asarray(ends[0], dtype), np.asarray(ends[1], dtype)


def _plain_ends(x: Value, axes: tuple[int, ...]) -> tuple[Any, Any]:
    low, high = extremes(x.dtype)
    return x.min(axes, initial=high), x.max(axes, initial=low)


def encode_order(x: Value) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Floating-point numbers as unsigned integers of the same order, and those of infinity.

    There are two for each number: NaN comes first in one, last in the other.
    """
    x = wide(x)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}").type
    sign, full = unsigned(1 << (8 * x.dtype.itemsize - 1)), unsigned(jnp.iinfo(unsigned).max)
    bits, unknown = lax.bitcast_convert_type(x, unsigned), jnp.isnan(x)
    code = jnp.where(bits >= sign, ~bits, bits | sign)
    infinity = np.asarray(np.inf, x.dtype).view(unsigned)[()]
    codes = jnp.where(unknown, unsigned(0), code), jnp.where(unknown, full, code)
    return codes, (unsigned(infinity | sign), unsigned(~(infinity | sign)))


def decode_order(code: Value, dtype: Any) -> Any:
    """The numbers of a type from integers of the same order."""
    sign = code.dtype.type(1 << (8 * code.dtype.itemsize - 1))
    bits = jnp.where(code >= sign, code ^ sign, ~code)
    return lax.bitcast_convert_type(bits, f"float{8 * code.dtype.itemsize}").astype(dtype)


def _encoded_ends(x: Value, *, axes: tuple[int, ...]) -> list[Any]:
    (low, high), (largest, smallest) = encode_order(x)
    return [low.min(axes, initial=largest), high.max(axes, initial=smallest)]


def _encoded_ends_by_groups(x: Value, *, axes: tuple[int, ...]) -> list[Any]:
    if len(axes) < x.ndim or not x.size:
        return _encoded_ends(x, axes=axes)
    codes, limits = encode_order(x)
    found = reduce_groups(
        codes, limits, lambda a, b: [jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])]
    )
    return [found[0].min(), found[1].max()]


# XLA makes vectors of a reduction to one number on a GPU, but not on a CPU.
_bind_encoded_ends = _jax.for_gpu("ends", _encoded_ends_by_groups, _encoded_ends)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def ends(x: Value, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """The smallest and the largest element along some axes; NaN if there is one.

    On a CPU, XLA loses NaN in the minimum of a large array. So numbers are compared as integers of
    the same order, among which NaN comes first, or last.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _plain_ends(x, axes)
    smallest, largest = _bind_encoded_ends(x, axes=axes)
    return decode_order(smallest, x.dtype), decode_order(largest, x.dtype)


@ends.defjvp
def _(axes: tuple[int, ...], primals: PyTree, tangents: PyTree) -> Any:
    (x,), (tangent,) = primals, tangents
    return ends(x, axes), jax.jvp(lambda x: _plain_ends(x, axes), (x,), (tangent,))[1]
