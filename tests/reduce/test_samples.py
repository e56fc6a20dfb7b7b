"""Histograms and quantiles of a sample: the counted elements, and the names of the results."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tapax

R = tapax.reduce


def counts(x, reducer):
    return tapax.capture(lambda x: tapax.sow(x, "h"), values={"h": reducer})(x)[1].values["h"]


@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 32, 5), 1), ((32,), 0), ((4, 3, 32), 2), ((32, 3), 0)], ids=str
)
def test_one_of_every_eight_neighbours_is_counted(shape, axis):
    # The value of each element is the number of its group.
    group = np.arange(shape[axis]) // 8
    x = np.broadcast_to(group.reshape(-1, *[1] * (len(shape) - axis - 1)), shape)
    found = counts(jnp.asarray(x, jnp.float32), R.histogram(range(5), sample=1 / 8))
    each = x.size // 32
    assert found.tolist() == [each] * 4


def test_neighbours_that_do_not_divide_an_axis():
    found = counts(jnp.arange(37.0), R.histogram(range(38), sample=1 / 8))
    assert found.sum() == 4
    assert [int(part.sum()) for part in np.split(np.asarray(found), [9, 18, 27])] == [1] * 4


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (4, 0)], ids=str)
def test_small_values_have_a_sample_of_one(shape):
    found = counts(jnp.ones(shape), R.histogram([0, 2], sample=1 / 16))
    assert found.tolist() == [min(1, int(np.prod(shape)))]


def test_the_places_are_random_and_depend_on_the_seed():
    place = jnp.broadcast_to(jnp.arange(1024.0) % 16, (64, 1024)).mT[:, :1]  # [1024, 1]
    places = jnp.broadcast_to(place, (40, 1024, 1))
    taken = {
        seed: np.asarray(counts(places, R.histogram(range(17), sample=1 / 16, seed=seed)))
        for seed in (0, 0, 1)
    }
    for found in taken.values():
        assert found.sum() == 40 * 64
        # Every position has 160 of 2,560, with a standard deviation of 12.
        assert np.abs(found - 160).max() < 75
    assert taken[0].tolist() != taken[1].tolist()
    again = jax.jit(tapax.capture(lambda x: tapax.sow(x, "h"), values={"h": _sampled()}))
    assert again(places)[1].values["h"].tolist() == counts(places, _sampled()).tolist()
    assert taken[0].tolist() == counts(places, R.histogram(range(17), sample=1 / 16)).tolist()


def _sampled():
    return R.histogram(range(17), sample=1 / 16)


def test_quantiles_of_a_sample_are_near_those_of_all():
    x = np.random.default_rng(0).normal(size=(64, 256, 8)).astype(np.float32)
    found = counts(jnp.asarray(x), R.quantiles([0.1, 0.5, 0.9], sample=1 / 16))
    np.testing.assert_allclose(found, np.quantile(x, [0.1, 0.5, 0.9]), atol=0.1)


def test_a_sample_of_one_in_one_is_everything():
    assert R.histogram([0, 1], sample=1) is R.histogram([0, 1])
    assert R.quantiles(0.5, sample=1.0) is R.quantiles(0.5)


def test_tables_and_logs_say_that_it_is_a_sample(tmp_path):
    reducers = [R.histogram([0, 1, 2], sample=1 / 16), R.quantiles([0.5], sample=1 / 4)]
    _, taps = tapax.capture(lambda x: tapax.sow(x, "h"), values={"h": reducers})(jnp.ones((64, 2)))
    assert list(taps.values) == ["h:histogram.sample16", "h:quantiles.sample4"]
    assert "histogram(sample=1/16)" in str(taps)
    taps.save(tmp_path / "taps")
    assert tapax.open(tmp_path / "taps").sites[0].reducer.one_in == 16

    records = []
    step = tapax.monitor(
        lambda x: tapax.sow(x, "h"),
        every=1,
        values={"h": reducers},
        grads=None,
        to=lambda step, record: records.append(record),
    )
    with step:
        step(jnp.ones((64, 2)))
    assert set(records[0]) >= {"h/value_histogram.sample16", "h/value_q0.5.sample4"}


@pytest.mark.parametrize("sample", [0, 2, -0.5, 0.3, "1/16", None, True, np.nan, 1e-6])
def test_samples_that_are_not_fractions_raise(sample):
    with pytest.raises(ValueError, match=re.escape(f"but is {sample!r}: one of n elements")):
        R.histogram([0, 1], sample=sample)


def test_seeds_that_are_not_words_raise():
    for seed in (-1, 2**32, 0.5, True):
        with pytest.raises(ValueError, match="`seed` must be an integer from 0"):
            R.quantiles(0.5, sample=0.5, seed=seed)


@pytest.mark.parametrize("spec", [P("d"), P(None, None, "d"), P(None, "d")], ids=str)
def test_a_sample_of_a_divided_value_moves_nothing(spec):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    value = np.random.default_rng(1).normal(size=(8, 128, 1024)).astype(np.float32)
    x = jax.device_put(value, NamedSharding(mesh, spec))
    reducer = R.histogram(log2=(-4, 4), sample=1 / 16)
    step = jax.jit(tapax.capture(lambda x: tapax.sow(2 * x, "h"), values={"h": reducer}))
    assert step(x)[1].values["h"].tolist() == counts(2 * value, reducer).tolist()
    text = step.lower(x).compile().as_text()
    moved = re.findall(r" (all-gather|all-to-all|collective-permute|all-reduce)\S*\(", text)
    assert set(moved) <= {"all-reduce"}
    sizes = re.findall(r"= (?:\()?\w+\[([\d,]*)\]\S* all-reduce", text)
    assert all(np.prod([int(n) for n in size.split(",") if n] or [1]) <= 16 for size in sizes)
