"""Statistics of rows, compared with NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax.data._shard_format import dtype_of


def harvested(x, folder, **options):
    return tapax.harvest(lambda x: tapax.sow(x, "h"), [x], to=folder, **options).stats["h"]


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25, 3e38])
def test_statistics_of_tiny_and_of_huge_numbers(tmp_path, size):
    x = size * np.random.default_rng(0).uniform(-1, 1, (64, 3)).astype(np.float32)
    found, wide = harvested(jnp.asarray(x), tmp_path), x.astype(np.float64)
    assert found.nonfinite == 0
    np.testing.assert_allclose(found.mean, wide.mean(0), atol=1e-5 * size)
    np.testing.assert_allclose(found.var, wide.var(0), rtol=1e-5)
    np.testing.assert_allclose(found.norm, np.linalg.norm(wide, axis=1).mean(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:In batch 0, there are values that are not finite")
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "some not finite"])
def test_a_huge_element_does_not_hide_the_variance_of_the_others(tmp_path, bad):
    x = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    x[0, 0], x[1, 3] = 1e30, -1e30  # like masked scores of attention
    used = x[:-1] if bad else x
    x[-1, 1] = np.nan if bad else 0
    found, wide = harvested(jnp.asarray(x), tmp_path), used.astype(np.float64)
    np.testing.assert_allclose(found.std, wide.std(0), rtol=1e-5)
    np.testing.assert_allclose(found.mean, wide.mean(0), rtol=1e-5, atol=1e-6)


def test_norms_of_huge_numbers_in_64_bits(tmp_path):
    with jax.enable_x64(True):
        x = jnp.asarray([[3e200, 4e200], [0.0, 0.0]], jnp.float64)
        found = harvested(x, tmp_path)
    np.testing.assert_allclose(found.norm, 2.5e200)
    np.testing.assert_allclose(found.mean, [1.5e200, 2e200])


def test_a_sum_of_norms_too_large_for_64_bits_is_infinite(tmp_path):
    with jax.enable_x64(True):
        found = harvested(jnp.full((4, 8), 1.7e308), tmp_path)
    assert found.norm == np.inf and (found.largest, found.rows) == (1.7e308, 4)
    assert tapax.open(tmp_path).verify().is_whole


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_overflows_are_those_of_the_conversion(tmp_path, dtype):
    largest = float(jnp.finfo(dtype).max)
    most = min(1.2 * largest, float(np.finfo(np.float32).max))
    x = np.linspace(largest, most, 4001, dtype=np.float32).reshape(-1, 1)
    with np.errstate(over="ignore"):
        converted = x.astype(dtype_of(dtype)).astype(np.float32)
    with pytest.warns(UserWarning, match="too large"):
        found = harvested(jnp.asarray(x), tmp_path, dtype=dtype)
    assert found.overflowed == np.sum(~np.isfinite(converted))
