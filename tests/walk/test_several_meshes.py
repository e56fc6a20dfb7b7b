"""Programs that use one mesh after another, over the same devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tapax
from tests.oracles.closeness import assert_close

X = jnp.arange(1.0, 9.0).reshape(4, 2) / 4


def meshes():
    devices = np.array(jax.devices()[:4])
    return Mesh(devices, ("d",)), Mesh(devices.reshape(2, 2), ("a", "b"))


def loss(x):
    row, grid = meshes()
    first = lambda x: jnp.sin(tapax.sow(x, "first"))
    second = lambda x: jnp.log(tapax.sow(jnp.sin(x), "h"))
    x = jax.shard_map(first, mesh=row, in_specs=P("d"), out_specs=P("d"))(x)
    return jnp.sum(jax.shard_map(second, mesh=grid, in_specs=P("a"), out_specs=P("a"))(x))


def by_hand(x, shift=0.0):
    return jnp.sum(jnp.log(jnp.sin(jnp.sin(x)) + shift))


H = jnp.sin(jnp.sin(X)).reshape(2, 2, 2)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_values_in_the_second_of_two_meshes_are_captured(wrap):
    out, taps = wrap(tapax.capture(loss))(X)
    assert_close(out, by_hand(X))
    assert_close(taps.values["first"], X.reshape(4, 1, 2))
    assert_close(taps.values["h"], H)
    sums = {"h": tapax.reduce.sum}
    assert_close(wrap(tapax.capture(loss, values=sums))(X)[1].values["h"], H.sum())


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_gradients_in_the_second_of_two_meshes_are_captured(wrap):
    grad, taps = wrap(tapax.capture(jax.grad(loss)))(X)
    assert_close(grad, jax.grad(by_hand)(X))
    assert_close(taps.grads["h"], 1 / H)
    assert_close(wrap(tapax.grad(loss))(X)["h"], 1 / H)


def test_values_in_the_second_of_two_meshes_are_edited_and_perturbed():
    assert_close(tapax.edit(loss, values={"h": lambda h: h + 1})(X), by_hand(X, 1.0))
    zeros = tapax.perturbations(loss)(X)
    assert_close(jax.jit(jax.grad(tapax.perturbed(loss)))(zeros, X)["h"], 1 / H)


def test_the_first_nan_in_the_second_of_two_meshes_is_found():
    found = tapax.find_nonfinite(loss)(X.at[3, 1].set(-1.0))
    assert found.operation == "log"
    assert found.device == {"a": 1, "b": 0}


def test_an_argument_may_be_on_another_mesh_than_the_program():
    row, grid = meshes()
    fn = lambda x: jnp.sin(tapax.sow(x, "h"))
    fn = jax.shard_map(fn, mesh=grid, in_specs=P("a"), out_specs=P("a"))
    x = jax.device_put(X, NamedSharding(row, P("d")))
    assert_close(tapax.capture(lambda x: jnp.sum(fn(x)))(x)[1].values["h"], X.reshape(2, 2, 2))
