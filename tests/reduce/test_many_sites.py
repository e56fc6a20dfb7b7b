"""Statistics of many sites compile to equal operations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax._walk.reductions import _finish_each, _finish_stacked

R = tapax.reduce
SITES = 20
BUILT_IN = [
    *(R.sum, R.mean, R.var, R.moments, R.norm, R.rms, R.minmax, R.zeros, R.nonfinite),
    *(R.rms(axis=-1), R.histogram([-1, 0, 1]), R.histogram(log2=(-2, 2)), R.quantiles([0.5])),
]


def many(x):
    for i in range(SITES):
        x = tapax.sow(jnp.sin(x) + i, f"h{i}")
    return x


@pytest.mark.parametrize("reducer", BUILT_IN, ids=str)
def test_the_state_of_a_value_is_that_of_an_update(reducer):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    assert reducer.sees_directly
    found, expected = reducer.see(x), reducer.update(reducer.start(x), x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("reducer", [R.rms, R.minmax, R.histogram([-1, 0, 1])], ids=str)
def test_results_are_the_same_stacked_or_not(reducer):
    states = [reducer.see(jnp.full((3,), n, jnp.float32)) for n in (0.5, -0.5, jnp.nan)]
    arrays = jax.tree.leaves(states)
    options = {"reducer": reducer, "treedef": jax.tree.structure(states[0]), "lead": 0}
    each, stacked = _finish_each(*arrays, **options), _finish_stacked(*arrays, **options)
    for a, b in zip(each, stacked, strict=True):
        np.testing.assert_array_equal(a, b)


def test_results_of_many_sites_are_right_and_compiled_alike():
    x = np.linspace(0, 1, 64, dtype=np.float32)
    captured = jax.jit(tapax.capture(many, values={"**": R.rms}))
    _, taps = captured(x)
    h = x.astype(np.float64)
    for i in range(SITES):
        h = np.sin(h) + i
        np.testing.assert_allclose(taps.values[f"h{i}"], np.sqrt(np.mean(h**2)), rtol=1e-5)
    # XLA compiles equal operations once for a CPU; slices of one array are not equal.
    if jax.default_backend() == "cpu":
        assert not re.search(r"= f32\[\]\S* \S*slice", captured.lower(x).compile().as_text())
    mapped = jax.vmap(lambda x: tapax.capture(many, values={"**": R.rms})(x)[1].values["h3"])
    assert mapped(jnp.stack([x, x])).shape == (2,)
    slope = jax.grad(lambda x: tapax.capture(many, values={"**": R.rms})(x)[1].values["h0"])(x)
    exact = (np.sin(x) * np.cos(x)) / 64 / np.sqrt(np.mean(np.sin(x) ** 2))
    np.testing.assert_allclose(slope, exact, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the program is that of a CPU")
@pytest.mark.parametrize("reducer", [R.rms, R.norm], ids=str)
def test_a_value_outside_of_loops_is_summed_once_and_needs_no_state(reducer):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    captured = jax.jit(tapax.capture(lambda x: tapax.sow(2 * x, "h"), values={"h": reducer}))
    program = captured.lower(x).as_text()
    assert program.count("stablehlo.reduce(") == 1 and "stablehlo.select" not in program
    norm = np.linalg.norm(2 * np.asarray(x, np.float64))
    expected = norm if reducer is R.norm else norm / np.sqrt(x.size)
    np.testing.assert_allclose(captured(x)[1].values["h"], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
@pytest.mark.parametrize("size", [1e-30, 1e-18, 1.0, 1e18, 1e30, np.inf, np.nan])
@pytest.mark.parametrize("around", ["nothing", "scan", "cond", "jit", "remat"])
def test_all_magnitudes_have_a_root_mean_square(around, size, dtype):
    def sown(x):
        return tapax.sow(x, "h")

    wrapped = {
        "nothing": sown,
        "scan": lambda x: jax.lax.scan(lambda _, x: (None, sown(x)), None, x[None])[1],
        "cond": lambda x: jax.lax.cond(x.shape[0] > jnp.arange(2).sum(), sown, lambda x: x, x),
        "jit": jax.jit(sown),
        "remat": jax.checkpoint(sown),
    }[around]
    x = jnp.full((5,), size, dtype)
    found = jax.jit(tapax.capture(wrapped, values={"h": R.rms}))(x)[1].values["h"]
    expected = np.abs(np.asarray(x).astype(np.complex128))[0]
    np.testing.assert_allclose(np.squeeze(found), expected, rtol=1e-5)


@pytest.mark.parametrize("reducer", [R.rms, R.norm], ids=str)
@pytest.mark.parametrize("infinite", [np.inf, complex(0, -np.inf), complex(np.inf, 1)], ids=str)
def test_infinite_complex_numbers_have_an_infinite_norm_in_mapped_captures(infinite, reducer):
    captured = tapax.capture(lambda x: tapax.sow(x, "h"), values={"h": reducer})
    x = jnp.array([[1, infinite, 2j], [3, 4j, 0]], jnp.complex64)
    found = jax.vmap(captured)(x)[1].values["h"]
    expected = 5 if reducer is R.norm else 5 / np.sqrt(3)
    np.testing.assert_allclose(found, [np.inf, expected], rtol=1e-6)
