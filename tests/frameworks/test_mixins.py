"""Methods that a module inherits from a mixin, a class that is not a module, are sites."""

import functools

import brainstate
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import linen, nnx

import tapax
from tests.oracles.closeness import assert_close

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3)
NAMES = ["Net/dense", "Net.encode", "Net"]


class Encoder:
    """A mixin for modules with a layer `dense`; a class without layers uses it, too."""

    def encode(self, x):
        return jnp.tanh(self.dense(x))


class Doubling(Encoder):
    def double(self, x):
        return 2 * self.encode(x)

    def __call__(self, x):
        return self.double(x) + 1


class Updated(Encoder):
    def update(self, x):
        return 2 * self.encode(x) + 1


class Called(Encoder):
    def call(self, x):
        return 2 * self.encode(x) + 1


class Plain(Doubling):
    def __init__(self, dense):
        self.dense = dense


def make_nnx():
    class Net(Doubling, nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    return Net()


def make_equinox():
    class Net(eqx.Module, Doubling):
        dense: eqx.nn.Linear

    return Net(eqx.nn.Linear(3, 3, key=jax.random.key(0)))


def make_brainstate():
    class Net(Updated, brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = brainstate.nn.Linear(3, 3)

    return Net()


def make_keras():
    class Net(Called, keras.Model):
        def __init__(self):
            super().__init__(name="Net")
            self.dense = keras.layers.Dense(3, name="dense")

    net = Net()
    net(X)
    return net


class HaikuNet(Doubling, hk.Module):
    def __init__(self):
        super().__init__(name="Net")
        self.dense = hk.Linear(3, name="dense")


def linen_apply(lift):
    class Net(Doubling, linen.Module):
        def setup(self):
            self.dense = linen.Dense(3)

    model = lift(Net)()
    return functools.partial(model.apply, model.init(jax.random.key(0), X))


def haiku_apply():
    model = hk.without_apply_rng(hk.transform(lambda x: HaikuNet()(x)))
    return functools.partial(model.apply, model.init(jax.random.key(0), X))


@pytest.mark.parametrize(
    "make",
    [
        lambda: linen_apply(lambda cls: cls),
        lambda: linen_apply(linen.remat),
        lambda: linen_apply(linen.jit),
        haiku_apply,
    ],
    ids=["linen", "linen, remat", "linen, jit", "haiku"],
)
def test_methods_that_the_framework_does_not_intercept_are_sites(make):
    fn = make()
    out, taps = tapax.capture(fn)(X)
    assert_close(out, fn(X))
    assert list(taps.values) == ["Net/dense", "Net.encode", "Net.double", "Net"]
    assert_close(taps.values["Net"], out)
    assert_close(taps.values["Net.double"] + 1, out)
    assert_close(tapax.edit(fn, values={"Net.encode": 0.0})(X), np.ones_like(out))


def run(model, x):
    return jax.vmap(model)(x) if isinstance(model, eqx.Module) else model(x)


MAKERS = [make_nnx, make_equinox, make_brainstate, make_keras]


@pytest.mark.parametrize("make", MAKERS)
def test_methods_of_a_mixin_are_sites(make):
    model = make()
    plain = run(model, X)
    out, taps = tapax.capture(lambda x: run(model, x))(X)
    assert_close(out, plain)
    assert [name for name in taps.values if name != "Net.double"] == NAMES
    assert_close(taps.values["Net"], plain)
    assert_close(2 * taps.values["Net.encode"] + 1, plain)
    edited = tapax.edit(lambda x: run(model, x), values={"Net.encode": 0.0})
    assert_close(edited(X), np.ones_like(plain))


@pytest.mark.parametrize("make", MAKERS)
def test_a_mixin_is_as_before_after_a_capture(make):
    model = make()
    mixins = [Encoder, Doubling, Updated, Called]
    before = [dict(vars(cls)) for cls in mixins]
    tapax.capture(lambda x: run(model, x))(X)
    assert [dict(vars(cls)) for cls in mixins] == before


def test_an_object_that_is_not_a_module_has_no_sites():
    model = make_nnx()
    plain = Plain(model.dense)
    out, taps = tapax.capture(lambda x: plain(x) + model(x))(X)
    assert_close(out, 2 * model(X))
    names = ["Net/dense", "Net/dense@1", "Net.encode", "Net.double", "Net"]
    assert list(taps.values) == names


def test_a_method_that_a_module_overrides_is_one_site():
    class Net(Doubling, nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return super().__call__(x) - 1

    model = Net()
    out, taps = tapax.capture(model)(X)
    assert list(taps.values) == ["Net/dense", "Net.encode", "Net.double", "Net"]
    assert_close(taps.values["Net"], out)
    assert_close(taps.values["Net.double"], out)
