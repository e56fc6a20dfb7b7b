"""Layers of Keras as sites: models of every kind, their variables, their training."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import tapax
from tapax import SiteError
from tests.models.keras_models import (
    NET_LAYERS,
    Block,
    Net,
    X,
    Y,
    branched,
    make_sequential,
    numbers,
    run_by_hand,
)
from tests.oracles.closeness import assert_close

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("keras_as_before")]


def test_values_are_those_of_a_model_with_every_output():
    model = branched()
    out, taps = tapax.capture(model)(X)
    nodes = [node for layer in model.layers for node in layer._inbound_nodes]
    tensors = {"shared": 0, "shared@1": 1}
    shared = model.get_layer("shared")
    outputs = {name: shared._inbound_nodes[i].output_tensors[0] for name, i in tensors.items()}
    outputs |= {name: model.get_layer(name).output for name in ("wide", "joined", "head")}
    wanted = keras.Model(model.input, outputs)(X)
    assert len(nodes) > len(outputs)
    wanted |= {"branched:out": wanted["head"], "branched:wide": wanted["wide"]}
    assert_close(dict(taps.values), wanted)
    assert_close(out, model(X))


@pytest.mark.many
def test_layers_of_a_subclassed_model_called_one_by_one():
    net = Net()
    net(X)
    out, taps = tapax.capture(net)(X)
    wanted, values = run_by_hand(net, X)
    assert list(taps.values) == NET_LAYERS
    assert_close(dict(taps.values), values)
    assert_close(out, wanted)


def test_layers_are_named_by_their_paths_in_keras():
    net = Net()
    net(X)
    with_weights = {x.path for x in net._flatten_layers() if x.weights and x.path}
    names = tapax.sites(net)(X).names
    assert with_weights <= set(names)
    assert {w.path.rpartition("/")[0] for w in net.trainable_weights} <= set(names)
    (site,) = [site for site in tapax.sites(net)(X) if site.name == "net/dense_2"]
    assert site.module is layers.Dense and site.method == "__call__"
    assert "keras_models.py" in site.source


@pytest.mark.many
def test_sequential_models_are_captured_with_and_without_an_input_shape():
    for first in ([], [keras.Input((4,))]):
        keras.backend.clear_session(free_memory=False)
        model = keras.Sequential([*first, layers.Dense(3), layers.ReLU(), layers.Dense(2)])
        out, taps = tapax.capture(model)(X)
        h, wanted = X, {}
        for layer in model.layers:
            h = wanted[f"sequential/{layer.name}"] = layer(h)
        assert_close(dict(taps.values), {**wanted, "sequential": h})
        assert_close(out, h)


@pytest.mark.many
def test_nested_models_keep_the_paths_of_their_layers():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4)], name="inner")
    x = keras.Input((4,))
    graph = keras.Model(x, layers.Dense(4, name="leaf")(inner(x)), name="graph")
    outer = keras.Sequential([keras.Input((4,)), graph, Block(name="block")], name="outer")
    _, taps = tapax.capture(outer)(X)
    leaf = graph(X)
    assert_close(
        {name: taps.values[name] for name in ("inner/dense", "leaf", "graph", "outer/block")},
        {
            "inner/dense": inner.layers[0](X),
            "leaf": leaf,
            "graph": leaf,
            "outer/block": outer.layers[1](leaf),
        },
    )


@pytest.mark.many
def test_selections_of_keras_layers():
    net = Net()
    net(X)
    assert list(tapax.capture(net, "net/*/dense*")(X)[1].values) == [
        "net/block/dense",
        "net/block_1/dense_1",
    ]
    only = lambda layer, method: isinstance(layer, Block)
    assert list(tapax.capture(net, modules=only)(X)[1].values) == ["net/block", "net/block_1"]
    with pytest.raises(SiteError, match="net/tail"):
        tapax.capture(net, "net/tail")(X)


def test_a_sow_in_a_layer_has_the_path_of_the_layer():
    class Sowing(layers.Layer):
        def call(self, x):
            return tapax.sow(2 * x, "doubled")

    _, taps = tapax.capture(Sowing(name="sowing"))(X)
    assert_close(taps.values["sowing/doubled"], 2 * X)


@pytest.mark.many
def test_modules_lists_layers_before_and_after_they_are_built():
    table = dict(tapax.modules(Net(), X))
    assert table["net/block_1"] is Block and table["net/dropout"] is layers.Dropout
    keras.backend.clear_session(free_memory=False)
    net = Net()
    with pytest.raises(TypeError, match="`modules` needs the arguments of a call"):
        tapax.modules(net)
    net(X)
    assert dict(tapax.modules(net)) == table
    assert dict(tapax.modules(branched()))["head"] is layers.Dense


def test_a_scope_around_two_models_prefixes_their_sites():
    teacher, student = make_sequential(), make_sequential()

    def both(x):
        with tapax.scope("teacher"):
            wanted = teacher(x)
        return student(x) - wanted

    names = tapax.sites(both)(X).names
    assert "teacher/sequential/dense" in names and "sequential_1/dense_2" in names


def make_step(model, optimizer):
    """Make a train step as in Keras' guide for JAX."""

    def loss_of(trainable, fixed, x, y):
        out, fixed = model.stateless_call(trainable, fixed, x, training=True)
        return keras.ops.mean(keras.losses.mean_squared_error(y, out)), fixed

    grad = jax.value_and_grad(loss_of, has_aux=True)

    def step(state, x, y):
        trainable, fixed, moments = state
        (loss, fixed), grads = grad(trainable, fixed, x, y)
        trainable, moments = optimizer.stateless_apply(moments, grads, trainable)
        return loss, (trainable, fixed, moments)

    return step


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_an_unmodified_stateless_train_step_is_captured(jit):
    model = make_sequential()
    model(X)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    state = [
        [v.value for v in group]
        for group in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    ]
    before = numbers(model)
    step = jit(make_step(model, optimizer))
    plain = step(state, X, Y)
    out, taps = tapax.capture(step)(state, X, Y)
    assert_close(jax.tree.leaves(out), jax.tree.leaves(plain))
    for a, b in zip(before, numbers(model), strict=True):
        np.testing.assert_array_equal(a, b)
    names = [f"sequential/{layer.name}" for layer in model.layers]
    assert list(taps.grads) == [*names, "sequential"] == list(taps.values)
    h = X
    for i, layer in enumerate(model.layers):
        h = layer(h, training=True) if i in (1, 2) else layer(h)
        assert_close(taps.values[names[i]], h, 1e-4)

    def tail(h, start):
        # The dropout has drawn its mask above, which advanced its seed.
        for i, layer in enumerate(model.layers[start:], start):
            kept = taps.values[names[2]] != 0
            h = h * kept / 0.7 if i == 2 else layer(h, training=True) if i == 1 else layer(h)
        return jnp.mean((h - Y) ** 2)

    for i, name in enumerate(names):
        with keras.StatelessScope():
            wanted = jax.grad(tail)(taps.values[name], i + 1)
        assert_close(taps.grads[name], wanted, err_msg=name)


def test_gradients_of_every_layer_agree_with_added_zeros():
    net = Net()
    net(X)
    loss = lambda x: jnp.mean((net(x) - Y) ** 2)
    found = tapax.grad(loss)(X)
    _, values = run_by_hand(net, X)
    zeros = jax.tree.map(jnp.zeros_like, values)
    wanted = jax.grad(lambda eps: jnp.mean((run_by_hand(net, X, eps)[0] - Y) ** 2))(zeros)
    assert_close(dict(found), wanted)


def test_gradients_of_a_shared_layer_belong_to_its_calls():
    model = branched()
    weights = [v.value for v in model.trainable_variables]
    loss = lambda weights: jnp.sum(model.stateless_call(weights, [], X)[0]["out"] ** 2)
    _, taps = tapax.capture(jax.grad(loss))(weights)
    wide, head = model.get_layer("wide"), model.get_layer("head")
    once = taps.values["shared"]
    last = lambda twice: jnp.sum(head(jnp.concatenate([twice, wide(once)], 1)) ** 2)
    assert_close(taps.grads["shared@1"], jax.grad(last)(taps.values["shared@1"]))
    shared = model.get_layer("shared")
    both = lambda h: jnp.sum(head(jnp.concatenate([shared(h), wide(h)], 1)) ** 2)
    assert_close(taps.grads["shared"], jax.grad(both)(once))


@pytest.mark.many
def test_a_stateless_model_is_captured_under_vmap_and_scan():
    model = make_sequential()
    model(X)
    state = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
    )
    one = lambda x: model.stateless_call(*state, x[None])[0][0]
    _, taps = tapax.capture(jax.vmap(one))(X)
    wanted = model.layers[0](X)
    assert_close(taps.values["sequential/dense"], wanted[:, None])
    _, taps = tapax.capture(lambda x: jax.lax.map(one, x))(X)
    assert_close(taps.values["sequential/dense"], wanted[:, None])


@pytest.mark.many
def test_rematerialized_layers_are_captured_once():
    with keras.RematScope(mode="full"):
        model = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(2)])
    model(X)
    weights = [v.value for v in model.trainable_variables]
    loss = lambda weights: jnp.sum(model.stateless_call(weights, [], X)[0] ** 2)
    _, taps = tapax.capture(jax.jit(jax.grad(loss)))(weights)
    h = model.layers[0](X)
    assert_close(taps.values["sequential/dense"], h)
    tail = lambda h: jnp.sum(model.layers[1](h) ** 2)
    assert_close(taps.grads["sequential/dense"], jax.grad(tail)(h))
    assert set(taps.grads) == {"sequential/dense", "sequential/dense_1", "sequential"}


@pytest.mark.many
def test_mixed_precision_keeps_sites_in_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = keras.Sequential([layers.Dense(4), layers.Dense(2, dtype="float32")])
        model(X)
    finally:
        keras.config.set_dtype_policy("float32")
    weights = [v.value for v in model.trainable_variables]
    loss = lambda weights: jnp.sum(model.stateless_call(weights, [], X)[0] ** 2)
    _, taps = tapax.capture(jax.grad(loss))(weights)
    assert taps.values["sequential/dense"].dtype == jnp.bfloat16
    assert taps.grads["sequential/dense"].dtype == jnp.bfloat16
    assert taps.grads["sequential/dense_1"].dtype == jnp.float32
    assert_close(tapax.capture(model)(X)[1].values["sequential/dense"], model.layers[0](X))


SERIES = np.random.default_rng(2).normal(size=(2, 5, 4)).astype("float32")


@pytest.mark.many
@pytest.mark.parametrize("make", [layers.LSTMCell, layers.GRUCell, layers.SimpleRNNCell])
def test_cells_of_recurrent_layers_are_stacked(make):
    model = layers.RNN(make(3), return_sequences=True, name="rnn")
    model(SERIES)
    weights = [v.value for v in model.trainable_variables]
    fixed = [v.value for v in model.non_trainable_variables]
    loss = lambda weights: jnp.sum(model.stateless_call(weights, fixed, SERIES)[0] ** 2)
    _, taps = tapax.capture(jax.jit(jax.grad(loss)))(weights)
    cell = model.cell
    site = f"rnn/{cell.name}:0"

    def by_hand(eps):
        states, outs = cell.get_initial_state(batch_size=2), []
        for t in range(5):
            out, states = cell(SERIES[:, t], states)
            outs.append(out + eps[t])
        return jnp.stack(outs)

    zeros = jnp.zeros((5, 2, 3))
    assert_close(taps.values[site], by_hand(zeros))
    assert_close(taps.values["rnn"], jnp.swapaxes(by_hand(zeros), 0, 1))
    wanted = jax.grad(lambda eps: jnp.sum(by_hand(eps) ** 2))(zeros)
    assert_close(taps.grads[site], wanted)


@pytest.mark.many
def test_wrapped_layers_have_separate_sites():
    model = keras.Sequential(
        [
            keras.Input((5, 4)),
            layers.Bidirectional(layers.LSTM(2, return_sequences=True), name="both"),
            layers.TimeDistributed(layers.Dense(3), name="each"),
        ]
    )
    _, taps = tapax.capture(model)(SERIES)
    both, each = model.layers
    assert_close(taps.values["sequential/both/forward_lstm"], both.forward_layer(SERIES))
    wanted = each.layer(both(SERIES))
    assert_close(taps.values["sequential/each"], wanted)
    calls = ["sequential/each/dense", *(f"sequential/each/dense@{t}" for t in range(1, 5))]
    assert_close(jnp.stack([taps.values[name] for name in calls], 1), wanted)


@pytest.mark.many
def test_masks_reach_the_layers_that_use_them():
    tokens = np.array([[1, 2, 0, 0], [3, 1, 2, 0]])
    model = keras.Sequential(
        [layers.Embedding(5, 4, mask_zero=True), layers.LSTM(3, return_sequences=True)]
    )
    model.compile("sgd", "mse")
    plain = model(tokens)
    out, taps = tapax.capture(model)(tokens)
    assert_close(out, plain)
    assert_close(taps.values["sequential/lstm"][0, 1], plain[0, 3])
    target = np.ones(plain.shape, "float32")
    loss = model.test_on_batch(tokens, target)
    captured, _ = tapax.capture(model.test_on_batch)(tokens, target)
    assert_close(captured, np.float32(loss))


@pytest.mark.many
def test_attention_layers_return_their_projections():
    layer = layers.MultiHeadAttention(2, 3, name="attend")
    layer(SERIES, SERIES)
    (out, weights), taps = tapax.capture(layer)(SERIES, SERIES, return_attention_scores=True)
    assert_close(taps.values["attend/query"], layer.query_dense(SERIES))
    assert_close(taps.values["attend:1"], weights)
    assert_close(taps.values["attend/attention_output"], out)


@pytest.mark.many
def test_mobilenet_as_published_is_captured():
    model = keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=3)
    table = tapax.sites(model)(np.zeros((1, 32, 32, 3), "float32"))
    assert [site.name for site in table] == [*(x.name for x in model.layers[1:]), model.name]
    assert all(site.shape[1:] == model.get_layer(site.name).output.shape[1:] for site in table[:-1])


def test_inputs_of_layers_are_sites_on_request():
    model = make_sequential()
    first, second = (layer for layer in model.layers[:2])
    _, taps = tapax.capture(model, values=f"**/{second.name}.input")(X)
    ((name, value),) = taps.values.items()
    assert name.endswith(f"{second.name}.input")
    assert_close(value, first(X))
    edited = tapax.edit(model, values={name: 0.0})(X)
    rest = jnp.zeros_like(first(X))
    for layer in model.layers[1:]:
        rest = layer(rest)
    assert_close(edited, rest)


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.MultiHeadAttention(2, 4, name="attn"),
        lambda: layers.MultiHeadAttention(2, 4, dropout=0.1, name="attn"),
        lambda: layers.GroupQueryAttention(4, 4, 2, name="attn"),
    ],
)
def test_weights_of_attention_are_those_keras_returns(make):
    layer = make()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32))
    mask = jnp.tril(jnp.ones((1, 5, 5), bool))
    _, want = layer(x, x, attention_mask=mask, return_attention_scores=True)
    run = lambda x: layer(x, x, attention_mask=mask)
    _, taps = tapax.capture(run, values="attn:weights")(x)
    assert_close(taps.values["attn:weights"], want)
    uniform = jnp.full(want.shape, 0.2)
    edited = tapax.edit(run, values={"attn:weights": uniform})(x)
    assert_close(edited, jnp.broadcast_to(edited[:, :1], edited.shape))
    assert not np.allclose(edited, run(x))
