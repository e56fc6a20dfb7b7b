"""Harvests into one folder mix no rows of different selections, weights or tables."""

import jax.numpy as jnp
import numpy as np
import pytest

import tapax

BATCH = [np.arange(24, dtype=np.float32).reshape(2, 3, 4)]


def mark(x):
    return tapax.sow(x, "h")


def pick(columns):
    return tapax.at("h", index=np.s_[..., columns])


@pytest.mark.parametrize(
    "select", [pick, lambda columns: ["h*", pick(columns)][1:], lambda c: pick(c) & "**"]
)
def test_other_columns_of_the_same_shape_are_refused(tmp_path, select):
    acts = tapax.harvest(mark, BATCH, to=tmp_path, values=select([0, 1]))
    np.testing.assert_array_equal(acts["h"], BATCH[0].reshape(6, 4)[:, [0, 1]])
    tapax.harvest(mark, BATCH, to=tmp_path, values=select(np.array([0, 1])))
    with pytest.raises(ValueError, match=r"`values` was .*checksum of its index arrays"):
        tapax.harvest(mark, BATCH, to=tmp_path, values=select([2, 3]))


WEIGHTS = np.arange(12).reshape(4, 3) % 5


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "int8", "int16", "bool", "float8_e4m3fn", "float4_e2m1fn"]
)
def test_other_weights_of_few_bits_are_refused(tmp_path, dtype):
    def harvest_with(weights):
        given = jnp.asarray(weights, getattr(jnp, dtype, dtype))
        return tapax.harvest(
            lambda x: tapax.sow(x @ given.astype(jnp.float32), "h"), BATCH, to=tmp_path
        )

    harvest_with(WEIGHTS)
    harvest_with(WEIGHTS.copy())
    with pytest.raises(ValueError, match="the checksum of the function's weights was"):
        harvest_with(WEIGHTS[::-1])


@pytest.mark.parametrize("state", [np.uint32([7, 8]), np.int32(3), np.bool_(True)])
def test_counters_flags_and_random_keys_may_change(tmp_path, state):
    def harvest_with(state):
        given = jnp.asarray(state)
        return tapax.harvest(lambda x: tapax.sow(x + 0 * given.sum(), "h"), BATCH, to=tmp_path)

    harvest_with(state)
    assert harvest_with(np.zeros_like(state)).is_complete


@pytest.mark.parametrize("name", ["example", "token"])
def test_a_site_with_the_name_of_a_column_is_refused(tmp_path, name):
    with pytest.raises(tapax.SiteError, match=f"A site and a column are both called '{name}'"):
        tapax.harvest(
            lambda x: tapax.sow(2.0 * x, name),
            [np.ones((2, 3), np.int32)],
            to=tmp_path,
            rows=(0, 1),
            values=name,
        )


@pytest.mark.parametrize(("to", "error"), [(None, TypeError), (3, TypeError), ("", ValueError)])
def test_a_folder_that_is_not_a_path_is_refused_before_anything_is_traced(to, error):
    def fn(x):
        raise AssertionError("traced")

    with pytest.raises(error, match="`to` takes the path of a folder, but is"):
        tapax.harvest(fn, BATCH, to=to)
