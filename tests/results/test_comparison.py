"""Errors between two arrays, with `np.spacing` as the oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from tapax._results import comparison
from tapax._results.comparison import Tolerance, coarser_type, compare_arrays

NONE = Tolerance()


def one_above(x, dtype):
    """Return the next larger number of a dtype after a positive one, from its bits."""
    x = np.asarray(x, dtype)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]
    return (x.view(bits) + bits(1)).view(x.dtype)


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
)
@pytest.mark.parametrize("start", [1.0, 1.5, 2.5, 0.375])
def test_neighbouring_numbers_are_one_unit_apart(dtype, start):
    x = np.full(4, start, jnp.dtype(dtype))
    y = x.copy()
    y[2] = one_above(x[2], x.dtype)
    found = compare_arrays(x, y, Tolerance(ulps=1))
    assert found.ulps == pytest.approx(1.0) and found.index == (2,)
    assert found.absolute == float(y[2]) - start and not found.differs
    assert compare_arrays(x, y, Tolerance(ulps=0.99)).differs


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_units_are_those_of_numpy(dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(40, 50)) * 10.0 ** rng.integers(-3, 9, (40, 50))).astype(dtype)
    y = x + np.asarray(rng.normal(size=x.shape) * 1e-3, dtype)
    mean = (np.abs(x, dtype=np.float64).mean() + np.abs(y, dtype=np.float64).mean()) / 2
    scale = np.maximum(np.maximum(np.abs(x), np.abs(y)).astype(np.float64), mean)
    error = np.abs(x.astype(np.float64) - y.astype(np.float64))
    found = compare_arrays(x, y, NONE)
    assert found.absolute == error.max()
    assert found.index == np.unravel_index(error.argmax(), error.shape)
    assert found.relative == pytest.approx((error / scale).max(), rel=1e-12)
    assert found.ulps == pytest.approx((error / np.spacing(scale.astype(dtype))).max(), rel=1e-9)


def test_numbers_that_cancelled_are_measured_by_the_mean():
    x = np.array([1.0, -1.0, 1e-7, 1.0], np.float32)
    y = np.array([1.0, -1.0, 0.0, 1.0], np.float32)
    assert not compare_arrays(x, y, Tolerance(ulps=4)).differs
    # One large number does not hide the others: the mean is not the maximum.
    x, y = np.ones(4096, np.float32), np.ones(4096, np.float32)
    x[0] = y[0] = 1e3
    y[7] = 1.001
    found = compare_arrays(x, y, Tolerance(ulps=4))
    assert found.differs and found.index == (7,)


def test_the_tolerance_is_a_sum():
    x, y = np.array([100.0, 1.0]), np.array([100.0, 1.5])
    assert compare_arrays(x, y, Tolerance(atol=0.49)).differs
    assert not compare_arrays(x, y, Tolerance(atol=0.51)).differs
    mean = (101 + 101.5) / 4
    assert compare_arrays(x, y, Tolerance(rtol=0.49 / mean)).differs
    assert not compare_arrays(x, y, Tolerance(rtol=0.51 / mean)).differs
    assert not compare_arrays(x, y, Tolerance(rtol=0.26 / mean, atol=0.26)).differs


def test_the_coarser_type_has_the_units():
    assert coarser_type(np.dtype("float32"), jnp.dtype("bfloat16")) == jnp.bfloat16
    assert coarser_type(jnp.dtype("bfloat16"), np.dtype("float16")) == jnp.bfloat16
    assert coarser_type(np.dtype("int32"), np.dtype("float64")) == np.float64
    assert coarser_type(np.dtype("complex64"), np.dtype("float64")) == np.complex64
    x = np.full(3, 1.0, np.float32)
    found = compare_arrays(x, x + np.float32(2**-7), NONE)
    assert found.ulps == 2.0**16
    rounded = (x + np.float32(2**-7)).astype("bfloat16")
    assert compare_arrays(x, rounded, NONE).ulps == 1.0


def test_nan_and_inf_equal_themselves_alone():
    x = np.array([1.0, np.nan, np.inf, -np.inf])
    found = compare_arrays(x, x.copy(), NONE)
    assert not found.differs and found.absolute == 0 and found.index is None
    for place, other in ((1, 1.0), (2, -np.inf), (2, np.nan), (0, np.nan), (0, np.inf)):
        y = x.copy()
        y[place] = other
        for one, two in ((x, y), (y, x)):
            found = compare_arrays(one, two, Tolerance(rtol=1e9, atol=1e9))
            assert found.differs and found.index == (place,)
            assert found.absolute == found.relative == found.ulps == np.inf


def test_integers_and_booleans_are_exact():
    loose = Tolerance(rtol=1.0, atol=1e6, ulps=1e6)
    x = np.array([3, 2**62, -5])
    y = np.array([3, 2**62 + 1, -5])
    found = compare_arrays(x, y, loose)
    assert found.differs and found.index == (1,) and found.ulps == found.absolute == 1
    assert not compare_arrays(x, x.astype(np.int64), loose).differs
    assert compare_arrays(np.array([True]), np.array([False]), loose).differs
    assert compare_arrays(np.array([-1]), np.array([2**64 - 1], np.uint64), loose).differs
    four = np.array([1, -8, 7]).astype("int4")
    assert not compare_arrays(four, np.array([1, -8, 7]), loose).differs
    assert compare_arrays(four, np.array([1, -8, 6]), loose).index == (2,)


def test_complex_numbers_are_compared_by_magnitude():
    x = np.array([3 + 4j, 1j], np.complex64)
    y = np.array([3 + 4j, 1.25j], np.complex64)
    found = compare_arrays(x, y, NONE)
    assert found.absolute == 0.25 and found.index == (1,)
    mean = (5 + 1 + 5 + 1.25) / 4
    assert found.relative == pytest.approx(0.25 / mean)
    assert not compare_arrays(x, y, Tolerance(atol=0.3)).differs


@pytest.mark.parametrize("axes", [(), (0,), (1,), (2, 0), (0, 1, 2)])
@pytest.mark.parametrize("tile", [1, 7, 1 << 20])
def test_iterations_are_compared_one_by_one(axes, tile, monkeypatch):
    monkeypatch.setattr(comparison, "_TILE", tile)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 4, 5)) * 10.0 ** np.arange(3)[:, None, None]
    y = x.copy()
    y[1, 2, 3] += 1e-3
    y[2, 0, 1] += 2e-3
    found = compare_arrays(x, y, Tolerance(rtol=1e-6), axes)
    assert found.index == (2, 0, 1) and found.absolute == pytest.approx(2e-3)
    others = tuple(axis for axis in range(3) if axis not in axes)
    moved = np.transpose(x != y, [*axes, *others])
    np.testing.assert_array_equal(found.differs, moved.any(tuple(range(len(axes), 3))))
    alone = [
        compare_arrays(*(np.transpose(z, [*axes, *others])[place] for z in (x, y)), NONE).ulps
        for place in np.ndindex(*(x.shape[axis] for axis in axes))
    ]
    np.testing.assert_allclose(found.ulps_by_iteration.ravel(), alone, rtol=1e-9)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,)])
def test_small_and_empty_arrays_are_compared(shape):
    x = np.ones(shape)
    axes = (0,) if len(shape) > 1 else ()
    assert not compare_arrays(x, x, NONE, axes).differs.any()
    found = compare_arrays(x, x + 1, NONE, axes)
    assert found.differs.any() == bool(x.size)
    assert found.index == ((0,) * len(shape) if x.size else None)


def test_subnormal_numbers_have_larger_relative_units():
    tiny = np.finfo(np.float32).smallest_subnormal
    x, y = np.array([tiny, tiny * 3]), np.array([tiny, tiny * 4])
    assert x.dtype == np.float32
    assert compare_arrays(x, y, NONE).ulps == pytest.approx(1.0)
    zeros = np.zeros(3, np.float32)
    assert not compare_arrays(zeros, -zeros, NONE).differs
