"""`self.sow` and `self.perturb` of Linen are sites, and store their values as without a capture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import tapax
from tests.models.linen_models import KEY, MLP, X, loss_of
from tests.oracles.closeness import assert_close

COLLECTIONS = [False, "intermediates", ["perturbations"], True]


class Marked(nn.Module):
    @nn.compact
    def __call__(self, x):
        inner = Marked.Inner(name="inner")
        x = inner(inner(x))
        return self.perturb("out", x, collection="mine")

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = self.perturb("h", nn.tanh(nn.Dense(4)(x)))
            self.sow("intermediates", "features", 2 * x)
            add = lambda a, b: a + b.sum()
            self.sow("losses", "total", x, reduce_fn=add, init_fn=lambda: jnp.zeros(()))
            return x


@pytest.mark.parametrize("mutable", COLLECTIONS)
def test_sow_and_perturb_are_sites_and_linen_stores_their_values(mutable):
    model = Marked()
    params = {"params": model.init(KEY, X)["params"]}
    apply = lambda v, x: model.apply(v, x, mutable=mutable)
    out, taps = tapax.capture(apply)(params, X)
    plain = apply(params, X)
    assert jax.tree.structure(out) == jax.tree.structure(plain)
    assert_close(out, plain, 1e-5)  # the layers compute in 32 bits in any case

    dense = lambda x: nn.tanh(
        nn.Dense(4).apply({"params": params["params"]["inner"]["Dense_0"]}, x)
    )
    one = dense(X)
    two = dense(one)
    expected = {"h": one, "h@1": two, "features": 2 * one, "features@1": 2 * two}
    for name, x in expected.items():
        assert_close(taps.values[f"Marked/inner/{name}"], x)
    assert_close(taps.values["Marked/inner/total"], one.sum() + two.sum(), 1e-5)
    assert_close(taps.values["Marked/out"], two)
    collections = {s.path: (s.kind, s.collection) for s in taps.sites if s.kind != "module"}
    assert collections == {
        "Marked/inner/h": ("perturb", "perturbations"),
        "Marked/inner/features": ("sow", "intermediates"),
        "Marked/inner/total": ("sow", "losses"),
        "Marked/out": ("perturb", "mine"),
    }


def test_perturb_has_one_gradient_for_each_call():
    model = Marked()
    params = {"params": model.init(KEY, X)["params"]}
    _, taps = tapax.capture(jax.grad(loss_of(model)))(params, X)
    dense = lambda x: nn.tanh(
        nn.Dense(4).apply({"params": params["params"]["inner"]["Dense_0"]}, x)
    )

    def chain(eps):
        return jnp.mean((dense(dense(X) + eps[0]) + eps[1]) ** 2)

    one, two = jax.grad(chain)(jnp.zeros((2, *X.shape)))
    assert_close(taps.grads["Marked/inner/h"], one)
    assert_close(taps.grads["Marked/inner/h@1"], two)
    assert_close(taps.grads["Marked/out"], two)
    assert not any("features" in name or "total" in name for name in taps.grads)


@pytest.mark.parametrize("kind", ["class", "remat"])
def test_sow_and_perturb_work_in_a_scan_without_a_declared_collection(kind):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = self.perturb("h", nn.tanh(nn.Dense(4)(x)))
            self.sow("intermediates", "f", x)
            self.sow("losses", "sum", x.sum(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
            return x, None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            lift = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
            layer = Layer if kind == "class" else nn.remat(Layer)
            return nn.scan(layer, **lift)(name="layers")(x, None)[0]

    model = Net()
    params = {"params": model.init(KEY, X)["params"]}
    _, taps = tapax.capture(jax.grad(loss_of(model)))(params, X)

    def chain(eps):
        x, seen = X, []
        for i in range(3):
            p = jax.tree.map(lambda p, i=i: p[i], params["params"]["layers"]["Dense_0"])
            x = nn.tanh(nn.Dense(4).apply({"params": p}, x)) + eps[i]
            seen.append(x)
        return jnp.mean(x**2), jnp.stack(seen)

    grads, seen = jax.grad(chain, has_aux=True)(jnp.zeros((3, *X.shape)))
    assert_close(taps.values["Net/layers/f"], seen)
    assert_close(taps.values["Net/layers/sum"], seen.sum())
    assert_close(taps.grads["Net/layers/h"], grads, 1e-4)


def test_capture_intermediates_of_linen_adds_no_second_mark():
    model = MLP()
    variables = model.init(KEY, X)
    apply = lambda v, x: model.apply(v, x, capture_intermediates=True)
    (_, state), taps = tapax.capture(apply)(variables, X)
    assert taps.sites.names == ["MLP/Dense_0", "MLP/Dense_1", "MLP"]
    np.testing.assert_array_equal(
        state["intermediates"]["Dense_0"]["__call__"][0], taps.values["MLP/Dense_0"]
    )


def test_attention_weights_that_flax_sows_are_sites():
    model = nn.MultiHeadDotProductAttention(num_heads=2)
    x = jax.random.normal(KEY, (1, 3, 4))
    variables = model.init(KEY, x)
    apply = lambda v, x: model.apply(v, x, sow_weights=True, mutable=["intermediates"])
    (_, state), taps = tapax.capture(apply)(variables, x)
    name = "MultiHeadDotProductAttention/attention_weights"
    np.testing.assert_array_equal(taps.values[name], state["intermediates"]["attention_weights"][0])


def test_names_with_special_characters_are_escaped():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "a:b/c", x)
            return nn.Dense(2, name="d@1")(x)

    model = Net()
    names = tapax.sites(model.apply)(model.init(KEY, X), X).names
    assert names == ["Net/a%3Ab%2Fc", "Net/d%401", "Net"]
