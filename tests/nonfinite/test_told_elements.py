"""Flags of bad elements: several values share a word, with NaNs apart from Infs if needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tapax

VALUES = 37  # of one shape, so that they fill more than two words


def sum_of_logarithms(x, fault):
    total = 0.0
    for i in range(VALUES):
        with tapax.scope(f"value{i}"):
            total += jnp.log(jnp.where(fault == i, -1.0, 1.0 + x * x))
    return total


@pytest.fixture(scope="module")
def find_logarithm():
    return tapax.find_nonfinite(jax.jit(sum_of_logarithms))


@pytest.mark.parametrize("fault", [0, 15, 16, 31, 32, VALUES - 1])
def test_each_of_many_values_has_a_bit(find_logarithm, fault):
    found = find_logarithm(jnp.arange(4.0), fault)
    assert (found.operation, found.path, found.kind) == ("log", f"value{fault}", "nan")


def test_no_bit_is_set_in_finite_values(find_logarithm):
    assert find_logarithm(jnp.arange(4.0), -1) is None


def test_divided_values_are_reduced_one_by_one(find_logarithm):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("data")))
    found = find_logarithm(x, 17)
    assert (found.operation, found.path) == ("log", "value17")


def test_nan_made_of_a_swallowed_constant_is_told_apart():
    def infinite_then_nan(x):
        # A division usually swallows an infinity, but not here.
        h = jnp.where(x > 0, jnp.inf, x) / (1.0 + x * x)
        return h - h

    found = tapax.find_nonfinite(jax.jit(infinite_then_nan))(jnp.array([-1.0, 2.0]))
    assert (found.operation, found.kind, found.index) == ("sub", "nan", (1,))


def test_nan_made_of_a_constant_in_a_loop_is_told_apart():
    def loop(x, bias):
        bias = jnp.where(bias > 0, -jnp.inf, 0.0)

        def body(carry, row):
            scores = row + bias
            return carry + jnp.exp(scores - scores.max()).sum(), None

        return jax.lax.scan(body, 0.0, x)[0]

    find = tapax.find_nonfinite(jax.jit(loop))
    x = jnp.ones((3, 4))
    assert find(x, jnp.array([1.0, 0.0, 1.0, 1.0])) is None
    found = find(x, jnp.ones(4))
    assert (found.operation, found.kind, found.iterations) == ("sub", "nan", (0,))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "keep",
    [lambda x: x * 0.5, lambda x: -1.0 * x, lambda x: x + 1.0, lambda x: 1.0 - x, lambda x: x / 2],
)
def test_small_literals_never_make_a_value_infinite(dtype, keep):
    largest = jnp.asarray([-1.0, 1.0], dtype) * jnp.finfo(dtype).max
    assert np.isfinite(np.asarray(keep(largest), np.float64)).all()


def test_overflow_is_found_before_a_scale():
    def scaled(x):
        return jnp.sum(0.5 * (x * x) + 1.0)

    found = tapax.find_nonfinite(jax.jit(scaled))(jnp.float32([1.0, 1e30]))
    assert (found.operation, found.kind, found.index) in [
        ("mul", "inf", (1,)),
        ("integer_pow", "inf", (1,)),
    ]


def test_large_literal_may_make_a_value_infinite():
    found = tapax.find_nonfinite(jax.jit(lambda x: x * 4.0))(jnp.float32([1.0, 3e38]))
    assert (found.operation, found.kind, found.index) == ("mul", "inf", (1,))


def test_infinite_argument_times_zero_literal_is_the_argument():
    found = tapax.find_nonfinite(jax.jit(lambda x: x * 0.0))(jnp.array([1.0, jnp.inf]))
    assert found.operation == "argument"
