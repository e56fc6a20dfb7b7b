"""The parts of reducer states: sums in a dtype that is wide enough, and counts.

A count is an array of uint32 that stays at the largest number instead of wrapping around to zero.
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
    """Convert a value to the dtype in which reducers accumulate it."""
    if x.dtype.itemsize >= 4:
        return x
    if x.dtype == jnp.bfloat16:
        return _widen_bfloat16(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float32)
    return x.astype(jnp.uint32 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else jnp.int32)


@jax.custom_jvp
def _widen_bfloat16(x: Value) -> Any:
    """Convert bfloat16 to float32 by its bits.

    XLA replaces a float32 that is rounded to bfloat16 and converted back by the original float32.
    It would then keep the float32, twice as large, where the program keeps the bfloat16.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << np.uint32(16), jnp.float32)


@_widen_bfloat16.defjvp
def _(primals: PyTree, tangents: PyTree) -> Any:
    return _widen_bfloat16(*primals), tangents[0].astype(jnp.float32)


def ordered(dtype: Any) -> Any:
    """Return the dtype in which to compare values: floats of 8 bits may lack an infinity."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1
    return jnp.dtype(jnp.float32 if small else dtype)


def square(x: Value) -> Any:
    """Square the magnitude of each element."""
    return jnp.real(x) ** 2 + jnp.imag(x) ** 2 if jnp.iscomplexobj(x) else jnp.square(x)


def _scaled_square(x: Value, scale: Value) -> Any:
    """Square the magnitude of each element times `scale`."""
    if not jnp.iscomplexobj(x):
        return jnp.square(x * scale)
    # An infinite complex number times a number is NaN, because one of its parts is 0 * infinity.
    return jnp.square(jnp.real(x) * scale) + jnp.square(jnp.imag(x) * scale)


def scales(dtype: Any) -> tuple[float, float]:
    """Return the factors that enlarge, and that shrink, magnitudes before they are squared."""
    scale = 2.0 ** (jnp.finfo(dtype).maxexp * 25 // 64)
    return scale, 1 / scale


def _sum_squares(x: Value, *, axes: tuple[int, ...]) -> list[Any]:
    # On a CPU, XLA would broadcast a constant once for all sites and keep an array as large as a
    # value. The barrier gives each site separate constants, which XLA broadcasts as it sums.
    factors = (np.asarray(scale, x.real.dtype) for scale in scales(x.dtype))
    x, *own = lax.optimization_barrier((x, *factors))
    return [_scaled_square(x, scale).sum(axes, dtype=x.real.dtype) for scale in own]


def _sum_squares_in_one_read(x: Value, *, axes: tuple[int, ...]) -> list[Any]:
    # For two sums XLA makes two kernels, and each reads the value. There is no barrier here: XLA
    # would treat its results as one operand of all sites, and merge their reductions.
    terms = [_scaled_square(x, np.asarray(scale, x.real.dtype)) for scale in scales(x.dtype)]
    varying = _jax.varying_axes(jax.typeof(x))
    zeros = [_jax.with_varying(jnp.zeros((), term.dtype), varying) for term in terms]
    return list(lax.reduce(terms, zeros, lambda a, b: [a[0] + b[0], a[1] + b[1]], axes))


def _sum_squares_on_cpu(x: Value, *, axes: tuple[int, ...]) -> list[Any]:
    # One sum of 64 bits covers all magnitudes. XLA compiles it in less time than two sums.
    if x.real.dtype == np.float64:
        return _sum_squares(x, axes=axes)
    with jax.enable_x64(True):
        total = _sum_squares_in_64_bits(x, axes)
        return [(total * np.float64(s) ** 2).astype(x.real.dtype) for s in scales(x.dtype)]


def _sum_squares_in_64_bits(x: Value, axes: tuple[int, ...]) -> Any:
    wider = x.astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)
    return square(wider).sum(axes)


_bind_sum_squares = _jax.for_gpu(
    "sum_squares", _sum_squares, _sum_squares_in_one_read, on_cpu=_sum_squares_on_cpu
)


def sum_squares(x: Value, axes: tuple[int, ...]) -> list[Any]:
    """Sum the squares of the enlarged magnitudes, and of the shrunk magnitudes.

    The square of a vanishing gradient becomes zero, and the square of an exploding gradient
    infinite, long before the gradient itself does. Together the two sums cover every magnitude from
    1e-33 to 1e30 in float32.
    """
    return list(_bind_sum_squares(x, axes=axes))


def root(sums: Any, among: Any = 1) -> Any:
    """Compute the root of the sum of squares, or of their mean over `among` elements."""
    larger, smaller = sums
    up, down = (np.asarray(s, larger.dtype) for s in scales(larger.dtype))
    fits = larger < 2.0 ** (jnp.finfo(larger.dtype).maxexp * 7 // 8)
    found = jnp.sqrt(lax.select(fits, larger, smaller) / among)
    return found * lax.select(fits, jnp.full_like(found, down), jnp.full_like(found, up))


def _root_squares(x: Value, *, axes: tuple[int, ...], among: int) -> list[Any]:
    return [root(_sum_squares(x, axes=axes), among)]


def _root_squares_in_one_read(x: Value, *, axes: tuple[int, ...], among: int) -> list[Any]:
    return [root(_sum_squares_in_one_read(x, axes=axes), among)]


def _root_squares_on_cpu(x: Value, *, axes: tuple[int, ...], among: int) -> list[Any]:
    if x.real.dtype == np.float64:
        return _root_squares(x, axes=axes, among=among)
    with jax.enable_x64(True):
        mean = _sum_squares_in_64_bits(x, axes) / np.float64(among)
        return [jnp.sqrt(mean).astype(x.real.dtype)]


_bind_root_squares = _jax.for_gpu(
    "root_squares", _root_squares, _root_squares_in_one_read, on_cpu=_root_squares_on_cpu
)


def root_squares(x: Value, axes: tuple[int, ...], *, mean: bool) -> Any:
    """Compute the root of the sum, or of the mean, of squares: `root` of `sum_squares`."""
    among = math.prod(x.shape[a] for a in axes) if mean else 1
    return _bind_root_squares(x, axes=axes, among=among)[0]


def all_but(x: Value, axis: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the axes of a value to reduce: all except `axis`."""
    kept = () if axis is None else (axis,) if isinstance(axis, int) else axis
    rank = len(x.shape)
    return tuple(a for a in range(rank) if a not in {k % rank for k in kept})


def count(mask: Value, axes: tuple[int, ...] | None = None) -> Any:
    """Count the true elements of `mask`."""
    return mask.sum(axes, dtype=COUNT)


def size(x: Value, axes: tuple[int, ...]) -> Any:
    """Return the number of elements of `x` along some axes, as a count."""
    return jnp.asarray(min(math.prod(x.shape[a] for a in axes), int(_MOST)), COUNT)


def add(a: Value, b: Value) -> Any:
    """Add two states."""

    def one(x: Value, y: Value) -> Any:
        both = x + y
        return jnp.where(both < x, _MOST, both) if x.dtype == COUNT else both

    return jax.tree.map(one, a, b)


def add_all(states: Any) -> Any:
    """Add states that are stacked along the first axis."""

    def one(x: Value) -> Any:
        total = x.sum(0, dtype=x.dtype)
        if x.dtype != COUNT:
            return total
        return jnp.where(x.sum(0, dtype=jnp.float32) >= 2.0**32, _MOST, total)

    return jax.tree.map(one, states)


def as_integers(counts: Any) -> Any:
    """Convert counts to int32, the usual integers of JAX."""
    return jnp.minimum(counts, jnp.asarray(2**31 - 1, COUNT)).astype(jnp.int32)


def extremes(dtype: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest number of a dtype."""
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
    """Encode floating-point numbers as unsigned integers that compare as the numbers do.

    Return two codes of each number, with NaN below all others in the first and above all others in
    the second; and the codes of infinity and of minus infinity.
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
    """Decode the integers of `encode_order` to numbers of a dtype."""
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


# XLA vectorizes a reduction to one number on a GPU, but not on a CPU.
_bind_encoded_ends = _jax.for_gpu("ends", _encoded_ends_by_groups, _encoded_ends)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def ends(x: Value, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Find the smallest and the largest element along some axes; both are NaN if an element is.

    On a CPU, XLA loses NaN in the minimum of a large array. So this compares the integers of
    `encode_order`, which put NaN below or above all numbers.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _plain_ends(x, axes)
    smallest, largest = _bind_encoded_ends(x, axes=axes)
    return decode_order(smallest, x.dtype), decode_order(largest, x.dtype)


@ends.defjvp
def _(axes: tuple[int, ...], primals: PyTree, tangents: PyTree) -> Any:
    (x,), (tangent,) = primals, tangents
    return ends(x, axes), jax.jvp(lambda x: _plain_ends(x, axes), (x,), (tangent,))[1]
