"""Normalizing flows of flowjax: layers stacked in a scan, weights masked when unwrapped."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import paramax
import pytest
from flowjax.distributions import Normal
from flowjax.flows import coupling_flow, masked_autoregressive_flow
from flowjax.train.losses import MaximumLikelihoodLoss
from flowjax.train.train_utils import step as train_step

import tapax
from tests.oracles.closeness import assert_close

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (5, 3))
LAYERS, WIDTH = 2, 6
CHAIN = "Transformed/bijection/bijection/bijection"
"""The bijection that is stacked and scanned over: an `Invert` and a `Scan` are around it."""
HIDDEN = "masked_autoregressive_mlp/layers/0"


def shifted_root(x):
    """Apply an activation that is NaN below -9."""
    return jnp.sqrt(x + 9)


def make(flow=masked_autoregressive_flow, **options):
    base = Normal(jnp.zeros(3))
    return flow(KEY, base_dist=base, flow_layers=LAYERS, nn_width=WIDTH, **options)


@pytest.fixture(scope="module")
def flow():
    return make(nn_activation=jnp.tanh)


def layers_of(flow):
    """Return the layers of the network in the scanned bijection."""
    return flow.bijection.bijection.bijection.bijections[0].masked_autoregressive_mlp.layers


def training(flow):
    """Return the arguments of flowjax's train step, as `fit_to_data` passes them."""
    frozen = lambda leaf: isinstance(leaf, paramax.NonTrainable)
    params, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=frozen)
    optimizer = optax.adam(1e-2)
    options = {"optimizer": optimizer, "opt_state": optimizer.init(params)}
    return (params, static, X), options | {"loss_fn": MaximumLikelihoodLoss()}


def named(values, end):
    """Return the only value whose name ends with `end`."""
    (found,) = [name for name in values if name.endswith(end)]
    return values[found]


@pytest.mark.parametrize("kind", [masked_autoregressive_flow, coupling_flow])
def test_captured_train_step_is_the_plain_one(kind):
    args, options = training(make(kind))
    out, taps = tapax.capture(train_step)(*args, **options)
    assert_close(out, train_step(*args, **options))
    assert len(taps.grads) > 10
    inside = "conditioner" if kind is coupling_flow else "masked_autoregressive_mlp"
    assert f"{CHAIN}/bijections/0/{inside}/layers/0" in taps.grads
    assert_close(out[2], -jnp.mean(taps.values["Transformed.log_prob"]))


def test_values_in_the_scanned_layers_are_those_of_masked_networks(flow):
    args, options = training(flow)
    _, taps = tapax.capture(train_step)(*args, **options)
    first, second = layers_of(flow)
    ranks = np.arange(3), np.arange(WIDTH) % 2, np.repeat(np.arange(3), 2)
    masks = ranks[1][:, None] >= ranks[0], ranks[2][:, None] > ranks[1]
    weights = [layer.weight.args[1] for layer in (first, second)]
    outputs = taps.values[f"{CHAIN}.transform_and_log_det:0"]
    for i, x in enumerate([X, outputs[0]]):
        hidden = x @ np.where(masks[0], weights[0][i], 0).T + first.bias[i]
        assert_close(named(taps.values, HIDDEN)[i], hidden)
        out = np.tanh(hidden) @ np.where(masks[1], weights[1][i], 0).T + second.bias[i]
        assert_close(named(taps.values, "masked_autoregressive_mlp")[i], out)


def test_determinants_agree_with_jacobians(flow):
    args, options = training(flow)
    _, taps = tapax.capture(train_step)(*args, **options)
    bijection = paramax.unwrap(flow.bijection)
    expected = [jnp.linalg.slogdet(jax.jacobian(bijection.inverse)(x))[1] for x in X]
    assert_close(taps.values["Transformed/bijection.inverse_and_log_det:1"], jnp.stack(expected))
    assert_close(
        taps.values["Transformed/bijection.inverse_and_log_det:0"], jax.vmap(bijection.inverse)(X)
    )


def test_gradients_in_the_scanned_layers_agree_with_biases_of_each_example(flow):
    """A bias adds to the value of its layer, so that both have the same gradient."""
    args, options = training(flow)
    _, taps = tapax.capture(train_step)(*args, **options)
    loss = eqx.filter_jit(eqx.filter_grad(lambda flow, x: -paramax.unwrap(flow).log_prob(x)))
    for n, x in enumerate(X):
        first, second = layers_of(loss(flow, x))
        assert_close(named(taps.grads, HIDDEN)[:, n], first.bias / len(X))
        grads = named(taps.grads, "masked_autoregressive_mlp/layers/1")
        assert_close(grads[:, n], second.bias / len(X))


def test_edit_of_one_scanned_layer_is_that_of_its_weights(flow):
    run = eqx.filter_jit(lambda flow, x: paramax.unwrap(flow).log_prob(x))
    second = {tapax.at(f"**/{HIDDEN}", step=1): lambda h: 0.5 * h}
    halved = jnp.array([1.0, 0.5])
    scaled = eqx.tree_at(
        lambda flow: [layers_of(flow)[0].weight.args[1], layers_of(flow)[0].bias],
        flow,
        replace_fn=lambda w: w * halved.reshape(-1, *[1] * (w.ndim - 1)),
    )
    edited = tapax.edit(run, values=second)(flow, X)
    assert_close(edited, run(scaled, X))
    assert not np.allclose(edited, run(flow, X))


def test_samples_are_the_plain_ones_and_the_network_runs_for_each_dimension(flow):
    sample = eqx.filter_jit(lambda flow, key: flow.sample(key, (4,)))
    out, taps = tapax.capture(sample)(flow, KEY)
    assert_close(out, sample(flow, KEY))
    hidden = named(taps.values, f"/{HIDDEN}")  # layers, dimensions, samples
    assert hidden.shape == (LAYERS, 3, 4, WIDTH)
    first = layers_of(flow)[0]
    weight = jnp.where(first.weight.args[0], first.weight.args[1], 0)
    # The last layer runs first, on the normal numbers, in the order of its permutation.
    order = flow.bijection.bijection.bijection.bijections[1].inverse_permutation[0][1]
    normal = named(taps.values, "base_dist/bijection.transform")[:, order]
    assert_close(hidden[1, 0], normal @ weight[1].T + first.bias[1])


def test_search_finds_the_scanned_layer_that_makes_a_nan():
    args, options = training(make(nn_activation=shifted_root))
    assert tapax.find_nonfinite(train_step)(*args, **options) is None
    bias = lambda params: layers_of(params)[0].bias
    params = eqx.tree_at(bias, args[0], bias(args[0]).at[1, 4].set(-20.0))
    found = tapax.find_nonfinite(train_step)(params, *args[1:], **options)
    assert (found.operation, found.kind, found.phase) == ("sqrt", "nan", "forward")
    # Equinox maps the activation over the units.
    assert (found.iterations, found.index, found.mapped) == ((1,), (), (0, 4))
    assert found.path.endswith("masked_autoregressive_mlp") and __file__ in found.source


def test_monitored_training_of_a_flow_is_the_plain_training(flow, tmp_path):
    (params, static, x), options = training(flow)
    optimizer, loss = options["optimizer"], options["loss_fn"]
    runs = []
    with tapax.monitor(train_step, every=1, to=tmp_path / "run.jsonl") as monitored:
        for step in (monitored, train_step):
            state = params, options["opt_state"]
            for _ in range(2):
                rest = {"optimizer": optimizer, "opt_state": state[1], "loss_fn": loss}
                state = step(state[0], static, x, **rest)[:2]
            runs.append(jax.tree.leaves(state))
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(tapax.open(tmp_path / "run.jsonl")) == 2
