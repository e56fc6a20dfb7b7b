"""A captured bound method is the method that was bound, whatever its function is called."""

import functools
import types

import brainstate
import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

X = np.linspace(-1.0, 1.0, 3, dtype=np.float32)


def unnamed(f):
    def wrapper(*args):
        return f(*args)

    return wrapper


def doubled(f):
    @functools.wraps(f)
    def wrapper(*args):
        return 2 * f(*args)

    return wrapper


class Methods:
    """Methods whose functions have other names, for a class that overrides `encode`."""

    def encode(self, x):
        return self.layer(x) + 1

    run = encode
    double = doubled(encode)
    scaled = unnamed(lambda self, x: 2 * self.layer(x))


class NNXBase(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    encode, run = Methods.encode, Methods.run
    double, scaled = Methods.double, Methods.scaled


class NNXNet(NNXBase):
    def encode(self, x):
        return 100 * self.layer(x)


class EquinoxBase(eqx.Module):
    layer: eqx.nn.Linear

    encode, run = Methods.encode, Methods.run
    double, scaled = Methods.double, Methods.scaled


class EquinoxNet(EquinoxBase):
    def encode(self, x):
        return 100 * self.layer(x)


class BrainstateBase(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = brainstate.nn.Linear(3, 3)

    encode, run = Methods.encode, Methods.run
    double, scaled = Methods.double, Methods.scaled


class BrainstateNet(BrainstateBase):
    def encode(self, x):
        return 100 * self.layer(x)


class KerasBase(keras.Model):
    def __init__(self):
        super().__init__(name="KerasNet")
        self.layer = keras.layers.Dense(3)

    def call(self, x):
        return self.layer(x[None])[0]

    def encode(self, x):
        return self(x) + 1

    run = encode
    double = doubled(encode)
    scaled = unnamed(lambda self, x: 2 * self(x))


class KerasNet(KerasBase):
    def encode(self, x):
        return 100 * self(x)


def make_keras():
    net = KerasNet()
    net(X)
    return net


MAKERS = {
    "NNXNet": NNXNet,
    "EquinoxNet": lambda: EquinoxNet(eqx.nn.Linear(3, 3, key=jax.random.key(0))),
    "BrainstateNet": BrainstateNet,
    "KerasNet": make_keras,
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_assigned_or_decorated_method_is_run_and_is_a_site(name):
    model = MAKERS[name]()
    for method in ("encode", "run", "double", "scaled"):
        bound = getattr(model, method)
        out, taps = tapax.capture(bound)(X)
        assert_close(out, bound(X))
        if method == "encode" or name != "EquinoxNet":  # Equinox finds methods by name
            assert_close(taps.values[f"{name}.{method}"], out)


@pytest.mark.parametrize("name", MAKERS)
def test_a_method_of_super_is_not_that_of_the_subclass(name):
    model = MAKERS[name]()
    bound = super(type(model), model).encode
    assert_close(tapax.capture(bound)(X)[0], bound(X))
    assert_close(tapax.capture(lambda f, x: f(x))(bound, X)[0], bound(X))
    twice = lambda x: 2 * bound(x)
    assert_close(tapax.capture(twice)(X)[0], twice(X))


def test_an_override_that_wraps_a_method_of_super_is_not_that_method():
    class Sub(NNXBase):
        encode = doubled(NNXBase.encode)
        run = None

    bound = super(Sub, Sub()).encode
    assert_close(tapax.capture(bound)(X)[0], bound(X))


def test_a_function_bound_to_an_nnx_module_is_run():
    model = NNXNet()
    bound = types.MethodType(lambda self, x: self.layer(x) - jnp.sum(x), model)
    out, taps = tapax.capture(bound)(X)
    assert_close(out, bound(X))
    assert list(taps.values) == ["NNXNet/layer"]


def test_a_bound_method_under_nnx_jit_is_a_site():
    class Sub(NNXBase):
        encode = nnx.jit(lambda self, x: 100 * self.layer(x))
        scaled = nnx.jit(NNXBase.encode)

    model = Sub()
    for name in ("encode", "scaled"):
        bound = getattr(model, name)
        out, taps = tapax.capture(bound)(X)
        assert_close(out, bound(X))
        assert_close(taps.values[f"Sub.{name}"], out)
    partial = functools.partial(NNXBase.encode, model)
    assert_close(tapax.capture(partial)(X)[0], partial(X))
