"""Residuals of models of the frameworks, by module.

The oracle is JAX's list of residuals for the model as a hand-written function of its arrays.
"""

import brainstate as bs
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies as policies

import tapax
from tests.models import linen_models, nnx_models
from tests.oracles.saved_residuals import jax_residuals, policy_types, table_types

X = nnx_models.X
DOTS = policies.dots_saveable


def nnx_parts():
    model = nnx_models.Net()
    graph, state = nnx.split(model)
    return model, lambda state, x: nnx_models.loss(nnx.merge(graph, state), x), state


def test_nnx_loss_keeps_what_its_function_keeps():
    model, function, state = nnx_parts()
    table = tapax.residuals(nnx_models.loss)(model, X)
    assert table_types(table) == jax_residuals(function, state, X)
    assert {"Net/blocks/0", "Net/blocks/1"} <= {r.site for r in table}
    assert {r.site for r in table} <= {"", *(f"Net/{s}".strip("/") for s in nnx_models.SITES)}


@pytest.mark.parametrize("jit", [lambda fn: fn, nnx.jit], ids=["plain", "jitted"])
def test_nnx_step_keeps_what_its_gradient_needs(jit):
    model, function, state = nnx_parts()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(nnx_models.loss)(model, x)
        optimizer.update(model, grads)
        return loss

    before = jax.tree.map(jnp.array, nnx.state((model, optimizer)))
    table = tapax.residuals(step, policy=DOTS)(model, optimizer, X)
    wanted = jax_residuals(lambda state: function(state, X), state)[0]
    rematted = jax_residuals(jax.checkpoint(lambda s: function(s, X), policy=DOTS), state)[0]
    assert table_types(table)[0] == wanted
    assert policy_types(table)[0] == rematted
    kernels = {r.site for r in table.arguments if r.kept}
    assert any("blocks/1/lin/kernel" in site for site in kernels)
    # Listing the residuals of a step does not run it.
    after = nnx.state((model, optimizer))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, after))


def test_nnx_dropout_keeps_its_mask_without_advancing_counts():
    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.lin = nnx.Linear(3, 8, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(jnp.tanh(self.lin(x)))

    model = Dropped(nnx.Rngs(0))
    counts = jax.tree.leaves(nnx.state(model, nnx.RngCount))
    table = tapax.residuals(nnx_models.loss)(model, X)
    masks = [r for r in table if r.dtype == bool]
    assert [(r.site, r.shape) for r in masks] == [("Dropped/drop", (4, 8))]
    assert counts == jax.tree.leaves(nnx.state(model, nnx.RngCount))


def test_linen_model_with_remat_keeps_the_inputs_of_its_blocks():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(3):
                x = nn.remat(linen_models.MLP)(name=f"block_{i}")(x)
            return x

    model, x = Stack(), linen_models.X
    params = model.init(linen_models.KEY, x)

    def loss(params, x):
        return jnp.sum(model.apply(params, x) ** 2)

    table = tapax.residuals(loss, policy=DOTS)(params, x)
    assert table_types(table) == jax_residuals(loss, params, x)
    assert policy_types(table) == jax_residuals(jax.checkpoint(loss, policy=DOTS), params, x)
    kept = {r.site for r in table if r.kept and r.site}
    assert all(site.startswith(("Stack/block_0", "Stack/block_1")) for site in kept)
    assert len(kept) == 2
    step = tapax.residuals(jax.jit(jax.value_and_grad(loss)))(params, x)
    assert table_types(step)[0] == table_types(table)[0]


def test_linen_scanned_layers_keep_one_value_for_each_layer():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(4)(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=5
            )
            return layers(name="layers")(x, None)[0]

    model, x = Stack(), linen_models.X
    params = model.init(linen_models.KEY, x)

    def loss(params):
        return jnp.sum(model.apply(params, x) ** 2)

    table = tapax.residuals(jax.grad(loss))(params)
    stacked = [r for r in table if r.loops]
    assert table_types(table)[0] == jax_residuals(loss, params)[0]
    assert {r.loops for r in stacked} == {("scan[5]",)}
    assert all(r.site.startswith("Stack/layers") for r in stacked)


@pytest.mark.parametrize("jit", [lambda fn: fn, eqx.filter_jit], ids=["plain", "jitted"])
def test_equinox_step_keeps_what_its_gradient_needs(jit):
    model = eqx.nn.MLP(3, 2, 8, 2, jax.nn.gelu, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    def function(arrays):
        return loss(eqx.combine(arrays, static), X)

    @jit
    def step(model, x):
        value, grads = eqx.filter_value_and_grad(loss)(model, x)
        return eqx.apply_updates(model, grads), value

    assert table_types(tapax.residuals(loss)(model, X)) == jax_residuals(
        lambda arrays, x: loss(eqx.combine(arrays, static), x), arrays, X
    )
    table = tapax.residuals(step, policy=DOTS)(model, X)
    assert table_types(table)[0] == jax_residuals(function, arrays)[0]
    assert policy_types(table)[0] == jax_residuals(jax.checkpoint(function, policy=DOTS), arrays)[0]
    assert {r.site for r in table if r.operation == "dot_general"} == {
        f"MLP/layers/{i}" for i in range(3)
    }


def test_haiku_function_keeps_values_of_its_modules():
    model = hk.without_apply_rng(hk.transform(lambda x: jnp.sum(hk.nets.MLP([8, 2])(x) ** 2)))
    params = model.init(jax.random.key(0), X)
    table = tapax.residuals(model.apply, policy=DOTS)(params, X)
    assert table_types(table) == jax_residuals(model.apply, params, X)
    assert {r.site for r in table if r.kept_by_policy} == {"mlp/linear_0", "mlp/linear_1"}


def test_brainstate_model_keeps_what_its_function_keeps():
    class Net(bs.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [bs.nn.Linear(3, 8), bs.nn.Linear(8, 2)]

        def update(self, x):
            return self.layers[1](jnp.tanh(self.layers[0](x)))

    model = Net()
    weights = [layer.weight.value for layer in model.layers]

    def loss(x):
        return jnp.mean(model.update(x) ** 2)

    def function(weights, x):
        (first, second) = weights
        h = jnp.tanh(x @ first["weight"] + first["bias"])
        return jnp.mean((h @ second["weight"] + second["bias"]) ** 2)

    assert table_types(tapax.residuals(loss)(X)) == jax_residuals(function, weights, X)
    grads = bs.transform.grad(loss, model.states(bs.ParamState))
    table = tapax.residuals(lambda x: grads(x), policy=DOTS)(X)
    rematted = jax.checkpoint(lambda weights: function(weights, X), policy=DOTS)
    assert table_types(table)[0] == jax_residuals(lambda w: function(w, X), weights)[0]
    assert policy_types(table)[0] == jax_residuals(rematted, weights)[0]
    assert {r.site for r in table if r.kept_by_policy} == {"Net/layers/0", "Net/layers/1"}
    assert all(layer.weight.value is w for layer, w in zip(model.layers, weights, strict=True))


@pytest.mark.usefixtures("keras_as_before")
def test_keras_model_keeps_what_its_function_keeps():
    layers = [keras.layers.Dense(8, "tanh", name="up"), keras.layers.Dense(1, name="down")]
    model = keras.Sequential([keras.Input((3,)), *layers], name="net")
    y = jnp.ones((4, 1))

    def loss(weights, x, y):
        return jnp.mean((model.stateless_call(weights, [], x)[0] - y) ** 2)

    weights = [v.value for v in model.trainable_variables]
    table = tapax.residuals(loss)(weights, X, y)
    assert table_types(table) == jax_residuals(loss, weights, X, y)
    assert table.by_site()["net/up"].nbytes >= 4 * 8 * 4

    model.compile("sgd", "mse")
    before = [jnp.array(v.value) for v in model.variables]
    step = tapax.residuals(model.train_on_batch, policy=DOTS)(X, y)
    assert {r.site for r in step if r.operation == "dot_general"} == {"net/up", "net/down"}
    assert all((a == v.value).all() for a, v in zip(before, model.variables, strict=True))
