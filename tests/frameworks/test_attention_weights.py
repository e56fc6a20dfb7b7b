"""Attention weights as sites, of layers that compute them and of fused kernels that do not."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close as close

RNG = np.random.default_rng(4)
X = jnp.asarray(RNG.normal(size=(2, 5, 8)).astype(np.float32))
CAUSAL = jnp.tril(jnp.ones((5, 5), bool))


def softmax(logits):
    """Compute the softmax along the last axis by NumPy in float64."""
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def weights_by_hand(query, key, mask=None):
    """Compute the weights of queries and keys [batch, length, heads, depth]."""
    logits = np.einsum("bthd,bshd->bhts", np.asarray(query), np.asarray(key))
    logits = logits / np.sqrt(query.shape[-1])
    return softmax(logits if mask is None else np.where(mask, logits, -1e30))


class Net(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.attn = nnx.MultiHeadAttention(
            num_heads=2, in_features=8, dropout_rate=dropout, decode=False, rngs=rngs
        )

    def __call__(self, x):
        return self.attn(x, mask=CAUSAL, deterministic=True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_weights_of_nnx_are_those_of_its_queries_and_keys(dropout):
    model = Net(nnx.Rngs(0), dropout)
    step = nnx.jit(nnx.grad(lambda model, x: jnp.sum(model(x) ** 2)))
    step(model, X)  # compiles the step before the capture
    wanted = ["Net/attn:weights", "Net/attn/query", "Net/attn/key"]
    _, taps = tapax.capture(step, values=wanted, grads="Net/attn:weights")(model, X)
    want = weights_by_hand(taps.values["Net/attn/query"], taps.values["Net/attn/key"], CAUSAL)
    close(taps.values["Net/attn:weights"], want)
    assert taps.sites["Net/attn:weights"].kind == "weights"

    def by_hand(weights):
        value = model.attn.value(X)
        out = jnp.einsum("bhts,bshd->bthd", weights, value)
        return jnp.sum(model.attn.out(out) ** 2)

    close(taps.grads["Net/attn:weights"], jax.grad(by_hand)(jnp.asarray(want, jnp.float32)), 1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_weights_of_nnx_are_edited(dropout):
    model = Net(nnx.Rngs(0), dropout)
    uniform = jnp.full((2, 2, 5, 5), 0.2)
    edited = tapax.edit(model, values={"Net/attn:weights": uniform})(X)
    mean = jnp.broadcast_to(model.attn.value(X).mean(1, keepdims=True), (2, 5, 2, 4))
    close(edited, model.attn.out(mean))
    head = tapax.at("Net/attn:weights", index=np.s_[:, 0])
    ablated = tapax.edit(model, values={head: 0.0})(X)
    value = model.attn.value(X)
    weights = tapax.capture(model, values="**:weights")(X)[1].values["Net/attn:weights"]
    out = jnp.einsum("bhts,bshd->bthd", weights.at[:, 0].set(0), value)
    close(ablated, model.attn.out(out))


def test_weights_of_linen_are_those_it_sows():
    layer = nn.MultiHeadDotProductAttention(num_heads=2)
    variables = layer.init(jax.random.key(0), X)
    _, state = layer.apply(variables, X, mask=CAUSAL, sow_weights=True, mutable=["intermediates"])
    (want,) = state["intermediates"]["attention_weights"]
    run = lambda variables, x: layer.apply(variables, x, mask=CAUSAL)
    _, taps = tapax.capture(jax.jit(run), values="**:weights")(variables, X)
    close(taps.values["MultiHeadDotProductAttention:weights"], want)


def test_weights_of_equinox_have_an_axis_of_heads():
    layer = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    run = jax.vmap(lambda x: layer(x, x, x, mask=CAUSAL))
    _, taps = tapax.capture(eqx.filter_jit(run), values="**:weights")(X)
    project = lambda linear: jax.vmap(jax.vmap(linear))(X).reshape(2, 5, 2, 4)
    want = weights_by_hand(project(layer.query_proj), project(layer.key_proj), CAUSAL)
    close(taps.values["MultiheadAttention:weights"], want)


def test_weights_of_haiku_are_those_of_its_queries_and_keys():
    def net(x):
        init = hk.initializers.VarianceScaling(1.0)
        return hk.MultiHeadAttention(2, 4, w_init=init, name="attn")(x, x, x)

    model = hk.without_apply_rng(hk.transform(net))
    params = model.init(jax.random.key(0), X)
    _, taps = tapax.capture(
        jax.jit(model.apply), values=["attn:weights", "attn/query", "attn/key"]
    )(params, X)
    split = lambda name: taps.values[f"attn/{name}"].reshape(2, 5, 2, 4)
    close(taps.values["attn:weights"], weights_by_hand(split("query"), split("key")))


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32))


LENGTHS = jnp.array([3, 6], jnp.int32)
OPTIONS = [
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"mask": normal(2, 1, 7, 6) > 0},
    {"bias": normal(1, 4, 7, 6)},
    {"local_window_size": 2},
    {"local_window_size": (1, 0), "is_causal": True},
    {"key_value_seq_lengths": LENGTHS},
    {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
]


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_weights_of_fused_attention_give_its_result(options, heads):
    query, key, value = normal(2, 7, 4, 3), normal(2, 6, heads, 3), normal(2, 6, heads, 3) + 1
    model = lambda *args: jax.nn.dot_product_attention(*args, **options)
    with_scope = lambda *args: _scoped(model, *args)
    out, taps = tapax.capture(jax.jit(with_scope), values="attn:weights")(query, key, value)
    weights = taps.values["attn:weights"]
    assert weights.shape == (2, 4, 7, 6)
    close(jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(value, 4 // heads, 2)), out)
    np.testing.assert_array_equal(out, jax.jit(model)(query, key, value))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": normal(4, 7, 6) > 0},
        {"mask": normal(1, 1, 7, 6) > 0},
        {"bias": normal(1, 4, 7, 6)},
        {"key_value_seq_lengths": LENGTHS[:1]},
        {"query_seq_lengths": LENGTHS[:1]},
    ],
    ids=["mask", "mask with examples", "bias with examples", "lengths of keys", "of queries"],
)
def test_weights_of_fused_attention_without_examples(options):
    query, key, value = normal(7, 4, 3), normal(6, 4, 3), normal(6, 4, 3) + 1
    model = lambda *args: _scoped(lambda *a: jax.nn.dot_product_attention(*a, **options), *args)
    out, taps = tapax.capture(model, values="attn:weights")(query, key, value)
    weights = taps.values["attn:weights"]
    assert weights.shape == (4, 7, 6)
    close(jnp.einsum("nts,snh->tnh", weights, value), out)
    edited = tapax.edit(model, values={"attn:weights": lambda w: w})
    close(edited(query, key, value), model(query, key, value))


def _scoped(model, *args):
    with tapax.scope("attn"):
        return model(*args)


def test_fused_attention_stays_fused_unless_its_weights_are_used():
    query = normal(2, 7, 4, 3)
    count = lambda fn: str(jax.make_jaxpr(fn)(query)).count("dot_general")
    model = lambda x: _scoped(lambda x: jax.nn.dot_product_attention(x, x, x), x)
    plain = count(model)
    assert count(tapax.capture(model, values=None, grads=None)) == plain
    assert count(tapax.capture(model, values="attn:weights")) == plain + 1
    edited = tapax.edit(model, values={"attn:weights": lambda w: w})
    assert count(edited) == plain
    close(edited(query), model(query))


def test_weights_of_fused_attention_have_gradients():
    query, value = normal(2, 7, 4, 3), normal(2, 7, 4, 3)
    loss = lambda v: jnp.sum(_scoped(jax.nn.dot_product_attention, query, query, v) ** 2)
    _, taps = tapax.capture(jax.grad(loss), values="attn:weights")(value)
    by_hand = lambda w: jnp.sum(jnp.einsum("bnts,bsnh->btnh", w, value) ** 2)
    want = jax.grad(by_hand)(taps.values["attn:weights"])
    close(tapax.grad(loss, at="attn:weights")(value)["attn:weights"], want, 1e-4)


def test_weights_in_scanned_and_recomputed_layers_are_captured():
    model = Net(nnx.Rngs(0))
    graph, state = nnx.split(model)

    def loss(state, x):
        layer = jax.checkpoint(lambda x: nnx.merge(graph, state)(x))
        return jnp.sum(jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0] ** 2)

    _, taps = tapax.capture(jax.jit(jax.grad(loss)), values=["**:weights", "**/query", "**/key"])(
        state, X
    )
    assert taps.values["Net/attn:weights"].shape == (3, 2, 2, 5, 5)
    for i in range(3):
        query, key = (taps.values[f"Net/attn/{name}"][i] for name in ("query", "key"))
        close(taps.values["Net/attn:weights"][i], weights_by_hand(query, key, CAUSAL))


def test_weights_are_sites_only_on_request():
    names = tapax.sites(Net(nnx.Rngs(0)))(X).names
    assert not any("weights" in name for name in names)
    _, taps = tapax.capture(Net(nnx.Rngs(0)), values=["**", "**:weights"])(X)
    assert [name for name in taps.values if name != "Net/attn:weights"] == names


def test_weights_that_do_not_exist_are_refused():
    class Other(nnx.Module):
        def __call__(self, x):
            return jax.nn.softmax(x @ x.mT) @ x

    with pytest.raises(tapax.SiteError, match="Mark the weights of other attention layers"):
        tapax.capture(Other(), values="Other:weights")(X)
    assert jax.nn.softmax.__module__.startswith("jax")


def odd_attention(query, key, value, **options):
    del key, options
    return query + value


class TwoKinds(nnx.Module):
    def __init__(self, rngs):
        layer = lambda **options: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs, **options)
        self.good, self.odd = layer(), layer(attention_fn=odd_attention)

    def __call__(self, x):
        return self.odd(self.good(x))


class LinenTwoKinds(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(2, name="good")(x)
        return nn.MultiHeadDotProductAttention(2, attention_fn=odd_attention, name="odd")(x)


def two_kinds(framework):
    """Make a function of `X` with an attention layer of each kind, and the name of its model."""
    if framework == "nnx":
        return TwoKinds(nnx.Rngs(0)), "TwoKinds"
    model = LinenTwoKinds()
    variables = model.init(jax.random.key(0), X)
    return lambda x: model.apply(variables, x), "LinenTwoKinds"


REASON = "calls neither flax.{}.dot_product_attention nor jax.nn.dot_product_attention"


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_glob_warns_of_weights_of_unknown_attention_functions(framework, recwarn):
    fn, model = two_kinds(framework)
    _, taps = tapax.capture(fn, values="**:weights")(X)
    assert list(taps.values) == [f"{model}/good:weights"]
    (warning,) = recwarn
    message = str(warning.message)
    assert f"'{model}/odd:weights' does not exist" in message
    assert REASON.format(framework) in message
    recwarn.clear()
    tapax.capture(fn, values=[f"{model}/good:weights", "**"])(X)
    assert not list(recwarn)


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_exact_name_of_weights_of_unknown_attention_functions_is_refused(framework):
    fn, model = two_kinds(framework)
    name, loss = f"{model}/odd:weights", lambda x: jnp.sum(fn(x) ** 2)
    ways = [
        lambda: tapax.capture(fn, values=name)(X),
        lambda: tapax.edit(fn, values={name: 0.0})(X),
        lambda: tapax.grad(loss, at=name)(X),
    ]
    for way in ways:
        with pytest.raises(tapax.SiteError, match=REASON.format(framework)):
            way()


def test_glob_of_an_edit_warns_of_weights_of_unknown_attention_functions():
    model = TwoKinds(nnx.Rngs(0))
    with pytest.warns(UserWarning, match="TwoKinds/odd:weights"):
        edited = tapax.edit(model, values={"**:weights": 0.0})(X)
    value = jnp.zeros((2, 5, 2, 4))
    close(edited, model.odd(model.good.out(value)))
