"""Each example of Flax's guide to intermediate values, as written and then with tapax."""

# ruff: noqa: RET504  (the code of the guide, as it is written there)

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import tapax
from tapax.compat import linen as compat
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

batch = jnp.ones((1, 28, 28, 1))


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=32, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Conv(features=64, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))  # flatten
        x = nn.Dense(features=256)(x)
        x = nn.relu(x)
        x = nn.Dense(features=10)(x)
        x = nn.log_softmax(x)
        return x


class SowCNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=32, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Conv(features=64, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))  # flatten
        self.sow("intermediates", "features", x)
        x = nn.Dense(features=256)(x)
        x = nn.relu(x)
        x = nn.Dense(features=10)(x)
        x = nn.log_softmax(x)
        return x


class SowCNN2(nn.Module):
    @nn.compact
    def __call__(self, x):
        mod = SowCNN(name="SowCNN")
        return mod(x) + mod(x)  # Calling same module instance twice.


class RefactoredCNN(nn.Module):
    def setup(self):
        self.features = Features()
        self.classifier = Classifier()

    def __call__(self, x):
        x = self.features(x)
        x = self.classifier(x)
        return x


class Features(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=32, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Conv(features=64, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))  # flatten
        return x


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(features=256)(x)
        x = nn.relu(x)
        x = nn.Dense(features=10)(x)
        x = nn.log_softmax(x)
        return x


class Sequential(nn.Module):
    layers: Sequence[nn.Module]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def SeqCNN():
    return Sequential(
        [
            nn.Conv(features=32, kernel_size=(3, 3)),
            nn.relu,
            lambda x: nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2)),
            nn.Conv(features=64, kernel_size=(3, 3)),
            nn.relu,
            lambda x: nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2)),
            lambda x: x.reshape((x.shape[0], -1)),  # flatten
            nn.Dense(features=256),
            nn.relu,
            nn.Dense(features=10),
            nn.log_softmax,
        ]
    )


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x))
        x = self.perturb("hidden", x)
        x = nn.Dense(2)(x)
        x = self.perturb("logits", x)
        return x


def close(a, b):
    assert_close(a, b, 1e-4)


def test_store_intermediate_values_in_a_new_variable_collection():
    @jax.jit
    def init(key, x):
        variables = SowCNN2().init(key, x)
        return variables

    @jax.jit
    def predict(variables, x):
        output, mod_vars = SowCNN2().apply(variables, x, mutable="intermediates")
        features = mod_vars["intermediates"]["SowCNN"]["features"]
        return output, features

    variables = init(jax.random.PRNGKey(0), batch)
    preds, feats = predict(variables, batch)
    assert len(feats) == 2  # Tuple with two values since module was called twice.
    assert set(variables) == {"params"}

    out, taps = tapax.capture(SowCNN2().apply)(variables, batch)
    close(out, preds)
    assert taps.sites["SowCNN2/SowCNN/features"].collection == "intermediates"
    for name, value in zip(("features", "features@1"), feats, strict=True):
        close(taps.values[f"SowCNN2/SowCNN/{name}"], value)
    # A function that uses Linen's collections works under capture as well.
    (preds_, feats_), taps = tapax.capture(predict)(variables, batch)
    close(preds_, preds)
    close(feats_[1], taps.values["SowCNN2/SowCNN/features@1"])


def test_sow_with_init_fn_and_reduce_fn():
    class Folded(nn.Module):
        @nn.compact
        def __call__(self, x):
            for factor in (1.0, 2.0):
                self.sow(
                    "intermediates",
                    "h",
                    factor * x,
                    init_fn=lambda: 0,
                    reduce_fn=lambda a, b: a + b,
                )
            return x

    _, state = Folded().apply({}, batch, mutable=["intermediates"])
    _, taps = tapax.capture(Folded().apply)({}, batch)
    close(taps.values["Folded/h"], state["intermediates"]["h"])


def test_refactor_module_into_submodules():
    @jax.jit
    def init(key, x):
        variables = RefactoredCNN().init(key, x)
        return variables["params"]

    @jax.jit
    def features(params, x):
        return RefactoredCNN().apply(
            {"params": params}, x, method=lambda module, x: module.features(x)
        )

    params = init(jax.random.PRNGKey(0), batch)
    expected = features(params, batch)

    _, taps = tapax.capture(RefactoredCNN().apply)({"params": params}, batch)
    close(taps.values["RefactoredCNN/features"], expected)
    _, taps = tapax.capture(features)(params, batch)
    assert "RefactoredCNN" not in taps.values
    close(taps.values["RefactoredCNN/features"], expected)


@pytest.fixture(scope="module")
def variables():
    @jax.jit
    def init(key, x):
        variables = CNN().init(key, x)
        return variables

    return init(jax.random.PRNGKey(0), batch)


@pytest.mark.parametrize("broken", [False, True])
def test_use_capture_intermediates(variables, broken):
    @jax.jit
    def predict(variables, x):
        y, state = CNN().apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
        intermediates = state["intermediates"]
        fin = jax.tree_util.tree_map(lambda xs: jnp.all(jnp.isfinite(xs)), intermediates)
        return y, fin

    if broken:
        bias = variables["params"]["Dense_0"]["bias"].at[3].set(jnp.nan)
        layer = {**variables["params"]["Dense_0"], "bias": bias}
        variables = {"params": {**variables["params"], "Dense_0": layer}}
    y, is_finite = predict(variables, batch)
    all_finite = all(jax.tree_util.tree_leaves(is_finite))
    assert all_finite is not broken

    out, taps = tapax.capture(CNN().apply)(variables, batch)
    close(out, y)
    finite = {name: bool(jnp.all(jnp.isfinite(x))) for name, x in taps.values.items()}
    assert all(finite.values()) is not broken
    for name, found in finite.items():
        inner = is_finite
        for part in name.split("/")[1:]:
            inner = inner[part]
        assert found == bool(inner["__call__"][0])
    assert len(finite) == len(jax.tree.leaves(is_finite))


filter_Dense = lambda mdl, method_name: isinstance(mdl, nn.Dense)
filter_encodings = lambda mdl, method_name: method_name == "encode"


@pytest.mark.parametrize("chosen", [filter_Dense, filter_encodings], ids=["Dense", "encodings"])
def test_filters_choose_captured_intermediates(variables, chosen):
    y, state = CNN().apply(
        variables, batch, capture_intermediates=chosen, mutable=["intermediates"]
    )
    dense_intermediates = state.get("intermediates", {})

    _, taps = tapax.capture(CNN().apply, modules=chosen)(variables, batch)
    found = {name.removeprefix("CNN/"): x for name, x in taps.values.items()}
    assert found.keys() == dense_intermediates.keys()
    for name, x in found.items():
        close(x, dense_intermediates[name]["__call__"][0])
    _, state = compat.apply(CNN(), variables, batch, capture_intermediates=chosen)
    jax.tree.map(close, state.get("intermediates", {}), dense_intermediates)


def test_a_filter_by_the_name_of_a_method():
    class Coder(nn.Module):
        def setup(self):
            self.encoder = nn.Dense(4)

        def encode(self, x):
            return nn.relu(self.encoder(x))

        def __call__(self, x):
            return self.encode(x).sum()

    x = jnp.ones((2, 3))
    variables = Coder().init(jax.random.PRNGKey(0), x)
    _, state = Coder().apply(variables, x, capture_intermediates=filter_encodings)
    _, taps = tapax.capture(Coder().apply, modules=filter_encodings)(variables, x)
    assert list(taps.values) == ["Coder.encode"]
    close(taps.values["Coder.encode"], state["intermediates"]["encode"][0])


def test_sequential_gives_every_intermediate():
    @jax.jit
    def init(key, x):
        variables = SeqCNN().init(key, x)
        return variables["params"]

    @jax.jit
    def features(params, x):
        return Sequential(SeqCNN().layers[0:7]).apply({"params": params}, x)

    params = init(jax.random.PRNGKey(0), batch)
    expected = features(params, batch)

    _, taps = tapax.capture(features)(params, batch)
    close(taps.values["Sequential"], expected)
    assert taps.sites.names == ["Sequential/layers_0", "Sequential/layers_3", "Sequential"]
    # In the whole model, the features are the flattened array that the next layer takes.
    whole = tapax.capture(SeqCNN().apply, values=["**", tapax.ops("reshape")])
    _, taps = whole({"params": params}, batch)
    close(taps.values["Sequential/reshape"], expected)
    after = nn.Dense(256).apply({"params": params["layers_7"]}, expected)
    close(taps.values["Sequential/layers_7"], after)


def test_extracting_gradients_of_intermediate_values():
    # The guide has jnp.empty here; this test uses random data.
    x = jax.random.normal(jax.random.PRNGKey(2), (1, 4))
    y = jax.random.normal(jax.random.PRNGKey(3), (1, 2))
    model = Model()
    variables = model.init(jax.random.PRNGKey(1), x)
    params, perturbations = variables["params"], variables["perturbations"]

    def loss_fn(params, perturbations, x, y):
        y_pred = model.apply({"params": params, "perturbations": perturbations}, x)
        return jnp.mean((y_pred - y) ** 2)

    intermediate_grads = jax.grad(loss_fn, argnums=1)(params, perturbations, x, y)

    def loss(params, x, y):
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    _, taps = tapax.capture(jax.grad(loss))(params, x, y)
    for name, expected in intermediate_grads.items():
        close(taps.grads[f"Model/{name}"], expected)
        assert taps.sites[f"Model/{name}"].collection == "perturbations"
    # Perturbations in the variables, and `compat.apply`, have these gradients too.
    _, taps = tapax.capture(jax.grad(loss_fn, argnums=1))(params, perturbations, x, y)
    close(taps.grads["Model/hidden"], intermediate_grads["hidden"])

    def replaced(perturbations):
        variables = {"params": params, "perturbations": perturbations}
        return jnp.mean((compat.apply(model, variables, x) - y) ** 2)

    jax.tree.map(close, jax.grad(replaced)(perturbations), intermediate_grads)
