"""Harvested rows equal a capture, in every framework, under jit, scan, remat and on a mesh."""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

import tapax

pytestmark = pytest.mark.once

TOKENS = [np.random.default_rng(i).integers(0, 7, (8, 3)).astype(np.int32) for i in range(3)]
X = [np.random.default_rng(i).integers(-3, 4, (8, 3, 4)).astype(np.float32) for i in range(3)]


def exact(tree):
    """Round weights to quarters, so that sums of a few products are exact in any order."""

    def rounded(x):
        is_float = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.round(x * 4) / 4 if is_float else x

    return jax.tree.map(rounded, tree)


def rows_of(batches):
    """Return the vectors in some batches, times two."""
    return np.concatenate([2 * x.reshape(-1, 4) for x in batches])


def check(fn, batches, folder, values, **options):
    """Compare every row of a harvest with a capture of the same batch."""
    acts = tapax.harvest(fn, batches, to=folder, values=values, **options)
    captured = [tapax.capture(fn, values=values, grads=None)(batch)[1] for batch in batches]
    assert acts.sites == list(captured[0].values)
    for name in acts.sites:
        expected = np.concatenate(
            [
                np.asarray(taps.values[name]).reshape(-1, taps.values[name].shape[-1])
                for taps in captured
            ]
        )
        found = np.asarray(acts[name])
        assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes(), name
    return acts


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.up(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.blocks = nnx.List([Block(4, rngs) for _ in range(2)])
        nnx.update(self, exact(nnx.state(self)))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def net():
    return Net(nnx.Rngs(0))


def test_rows_of_an_nnx_model_as_it_is_called(net, tmp_path):
    acts = check(net, TOKENS, tmp_path, "Net/**")
    assert "Net/blocks/1/up" in acts.sites


def test_rows_of_a_jitted_function_that_holds_an_nnx_model(net, tmp_path):
    acts = check(nnx.jit(lambda tokens: net(tokens)), TOKENS, tmp_path / "nnx", "**/blocks/*")
    assert len(acts.sites) == 2
    check(jax.jit(lambda tokens: net(tokens)), TOKENS, tmp_path / "jax", "**/blocks/*")


def test_state_of_a_model_stays_as_it_is(tmp_path):
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] += 1
            return tapax.sow(2 * x, "h")

    counting = Counting()
    tapax.harvest(counting, X, to=tmp_path, values="**/h")
    assert counting.calls[...] == 0


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(linen.relu(linen.Dense(4)(x)))


def test_rows_of_a_linen_model_in_a_partial_function(tmp_path):
    model = Linen()
    params = exact(model.init(jax.random.key(0), X[0]))
    check(functools.partial(model.apply, params), X, tmp_path / "partial", "Linen/Dense_0")
    check(lambda x: model.apply(params, x), X, tmp_path / "closure", "Linen/Dense_0")


def test_rows_of_an_equinox_model_that_is_mapped_over_examples(tmp_path):
    model = exact(eqx.nn.MLP(4, 2, 8, 1, activation=jax.nn.relu, key=jax.random.key(0)))
    both = jax.vmap(jax.vmap(model))
    acts = check(both, X, tmp_path, "MLP/layers/*")
    assert acts["MLP/layers/1"].shape == (72, 2) and "position" in acts.columns


def test_rows_of_a_haiku_model(tmp_path):
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4, 2], name="mlp")(x)))
    params = exact(model.init(jax.random.key(0), X[0]))
    check(functools.partial(model.apply, params), X, tmp_path, "**/linear_*")


def test_rows_of_a_keras_model(tmp_path):
    keras = pytest.importorskip("keras")
    inputs = keras.Input((3, 4))
    hidden = keras.layers.Dense(4, activation="relu", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(hidden), name="net")
    for weight in model.weights:
        weight.assign(jnp.round(weight.value * 4) / 4)
    check(model, X, tmp_path, "hidden")


def make_stack(remat):
    class Stack(nnx.Module):
        def __init__(self):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,))
            def make(rngs):
                return Block(4, rngs)

            self.layers = make(nnx.Rngs(0))
            nnx.update(self, exact(nnx.state(self)))

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def run(block, x):
                return (nnx.remat(Block.__call__) if remat else Block.__call__)(block, x)

            return run(self.layers, x)

    return Stack()


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_become_sites_or_an_axis(tmp_path, remat):
    stack = make_stack(remat)
    split = tapax.harvest(stack, X, to=tmp_path / "sites", values="Stack/layers/up")
    assert split.sites == [f"Stack/layers/{i}/up" for i in range(3)]
    axis = tapax.harvest(stack, X, to=tmp_path / "axis", values="Stack/layers/up", layers="axis")
    one = tapax.harvest(stack, X, to=tmp_path / "one", values="Stack/layers/1/up")
    taps = [tapax.capture(stack, values="Stack/layers/up")(x)[1] for x in X]
    stacked = np.concatenate([np.asarray(t.values["Stack/layers/up"]) for t in taps], 1)
    rows = stacked.reshape(3, -1, 4)
    assert np.asarray(axis["Stack/layers/up"]).tobytes() == rows.swapaxes(0, 1).tobytes()
    for i in range(3):
        assert np.asarray(split[f"Stack/layers/{i}/up"]).tobytes() == rows[i].tobytes()
    assert one.sites == ["Stack/layers/1/up"]
    assert np.asarray(one["Stack/layers/1/up"]).tobytes() == rows[1].tobytes()


@pytest.mark.parametrize("keep", [None, lambda x: x[..., 0] > 0])
def test_rows_of_a_model_that_is_divided_over_devices(net, tmp_path, keep):
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(auto, auto))
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    weights = jax.device_put(
        np.eye(4, dtype=np.float32) * 2, NamedSharding(mesh, PartitionSpec(None, "model"))
    )

    @functools.partial(jax.jit, in_shardings=by_rows)
    def model(x):
        return tapax.sow(x @ weights, "h").sum()

    acts = tapax.harvest(model, X, to=tmp_path, keep=keep)
    rows = np.concatenate([x.reshape(-1, 4) for x in X])
    rows = rows if keep is None else rows[keep(rows)]
    assert np.asarray(acts["h"]).tobytes() == (2 * rows).tobytes()
    np.testing.assert_allclose(acts.stats["h"].mean, 2 * rows.mean(0), atol=1e-5)


def test_explicitly_sharded_arrays_become_rows(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    batches = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in X]
    acts = tapax.harvest(lambda x: tapax.sow(2 * x, "h"), batches, to=tmp_path)
    assert (
        np.asarray(acts["h"]).tobytes()
        == np.concatenate([2 * x.reshape(-1, 4) for x in X]).tobytes()
    )


def test_the_axes_of_a_shard_map_must_be_named(mesh, tmp_path):
    local = jax.shard_map(
        lambda x: tapax.sow(2 * x, "h"),
        mesh=mesh,
        in_specs=PartitionSpec("a"),
        out_specs=PartitionSpec("a"),
    )
    with pytest.raises(tapax.SiteError, match=r"inside a shard_map over a\[2\].*rows=\(0, 1\)"):
        tapax.harvest(local, X, to=tmp_path / "tokens")
    acts = tapax.harvest(local, X, to=tmp_path / "axes", rows=(0, 1, 2))
    assert (
        np.asarray(acts["h"]).tobytes()
        == np.concatenate([2 * x.reshape(-1, 4) for x in X]).tobytes()
    )


def test_gradients_of_a_jitted_train_step_are_those_of_a_capture(net, tmp_path):
    @nnx.jit
    def train_step(net, tokens):
        return nnx.grad(lambda net: net(tokens).sum())(net)

    step = functools.partial(train_step, net)
    acts = tapax.harvest(step, TOKENS, to=tmp_path, values=None, grads="**/blocks/0")
    [name] = acts.sites
    taps = [tapax.capture(step, values=None, grads="**/blocks/0")(t)[1] for t in TOKENS]
    expected = np.concatenate([np.asarray(t.grads[name[:-5]]).reshape(-1, 4) for t in taps])
    assert name.endswith(".grad") and np.asarray(acts[name]).tobytes() == expected.tobytes()
