"""Programs of frameworks that once were captured wrongly. Each test says what went wrong."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import tapax
from tapax.compat import linen as compat
from tests.oracles.closeness import assert_close

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class Net(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return jnp.tanh(self.linear(x))

    @eqx.filter_checkpoint
    def checkpointed(self, x):
        return self(x)

    @eqx.filter_vmap(in_axes=(None, 0))
    def mapped(self, x):
        return self(x)


class NNXNet(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.tanh(self.encode(x))

    def encode(self, x):
        return self.linear(x)


def net():
    return Net(eqx.nn.Linear(4, 3, key=jax.random.key(0)))


@pytest.mark.parametrize("jit", [lambda fn: fn, jax.jit])
def test_the_call_of_an_equinox_module_as_a_bound_method_had_no_site(jit):
    model = net()
    expected = np.asarray(model(X[0]))
    out, taps = tapax.capture(jit(model.__call__))(X[0])
    assert_close(out, expected)
    assert_close(taps.values["Net"], expected)
    _, taps = tapax.capture(jit(model.linear.__call__))(X[0])
    assert_close(taps.values["Linear"], model.linear(X[0]))


def test_a_bound_method_of_an_nnx_module_under_jit_had_no_site():
    model = NNXNet()
    expected = np.asarray(model(X))
    _, taps = tapax.capture(jax.jit(model.__call__))(X)
    assert set(taps.values) == {"NNXNet", "NNXNet.encode", "NNXNet/linear"}
    assert_close(taps.values["NNXNet"], expected)
    _, taps = tapax.capture(jax.jit(model.encode))(X)
    assert_close(taps.values["NNXNet.encode"], model.encode(X))


@pytest.mark.parametrize("method", ["checkpointed", "mapped"])
def test_equinox_warned_of_methods_whose_wrapper_has_numbers(method):
    # Warnings are errors.
    x = X if method == "mapped" else X[0]
    run = lambda model, x: getattr(model, method)(x)
    expected = np.asarray(run(net(), x))
    out, taps = tapax.capture(run)(net(), x)
    assert_close(out, expected)
    assert set(taps.values) == {"Net", f"Net.{method}", "Net/linear"}


@pytest.mark.parametrize("modules", ["nope", "**/nope", ["Net", "Net/nope"]])
def test_modules_that_match_nothing_gave_nothing(modules):
    with pytest.raises(tapax.SiteError, match=r"modules='.*nope' .* no module .* tapax\.sites"):
        tapax.capture(net(), modules=modules)(X[0])


def test_compat_linen_returned_perturbations_that_were_not_mutable():
    class Perturbed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(self.perturb("p", nn.Dense(3)(x)))

    variables = Perturbed().init(jax.random.key(0), X)
    given = {"mutable": ["intermediates"], "capture_intermediates": True}
    expected = Perturbed().apply(variables, X, **given)
    got = compat.apply(Perturbed(), variables, X, **given)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert_close(got, expected)


@pytest.mark.parametrize("jit", [lambda fn: fn, nnx.jit])
def test_a_variable_put_in_the_place_of_another_was_lost(jit):
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.BatchStat(jnp.zeros(2))
            self.nested = nnx.data({"count": nnx.BatchStat(jnp.zeros(2))})

        def __call__(self, x):
            self.count = nnx.BatchStat(self.count[...] + 1)
            self.nested = nnx.data({"count": nnx.BatchStat(self.nested["count"][...] + 2)})
            return x * self.count[...].sum()

    run, plain, seen = jit(lambda model, x: model(x)), Counter(), Counter()
    captured = tapax.capture(run)
    for _ in range(3):
        expected = run(plain, X)
        out, taps = captured(seen, X)
        assert_close(out, expected)
        assert_close(taps.values["Counter"], expected)
        assert_close(seen.count[...], plain.count[...])
        assert_close(seen.nested["count"][...], plain.nested["count"][...])


@pytest.mark.parametrize("jit", [lambda fn: fn, nnx.jit])
def test_the_running_average_of_a_linen_module_in_an_nnx_one_was_lost(jit):
    def make():
        norm = nn.BatchNorm(use_running_average=False)
        return nnx.bridge.lazy_init(nnx.bridge.ToNNX(norm, rngs=nnx.Rngs(0)), X)

    run, plain, seen = jit(lambda model, x: model(x, mutable=["batch_stats"])), make(), make()
    expected = run(plain, X)
    out, _ = tapax.capture(run)(seen, X)
    assert_close(out, expected)
    assert np.any(plain.mean[...])
    assert_close(seen.mean[...], plain.mean[...])
