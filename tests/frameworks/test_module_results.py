"""Capture passes the result of a module on unchanged: keys in order, objects complete."""

from typing import Any, NamedTuple

import brainstate
import brainunit as u
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7])


class Heads(NamedTuple):
    named: Any


def heads(x, nested):
    """Return two values by name, whose names are not in alphabetical order."""
    out = {"second": jnp.sin(x), "first": x**2}
    return Heads({"inner": [out]}) if nested else out


def weigh(out):
    """Combine the values in the order of the keys."""
    out = out.named["inner"][0] if isinstance(out, Heads) else out
    assert list(out) == ["second", "first"]
    return sum((i + 1) * value for i, value in enumerate(out.values()))


class EquinoxHeads(eqx.Module):
    nested: bool

    def __call__(self, x):
        return heads(x, self.nested)


class NnxHeads(nnx.Module):
    def __init__(self, nested):
        self.nested = nested

    def __call__(self, x):
        return heads(x, self.nested)


class LinenHeads(nn.Module):
    nested: bool

    def __call__(self, x):
        return heads(x, self.nested)


class HaikuHeads(hk.Module):
    def __init__(self, nested):
        super().__init__()
        self.nested = nested

    def __call__(self, x):
        return heads(x, self.nested)


class BrainstateHeads(brainstate.nn.Module):
    def __init__(self, nested):
        super().__init__()
        self.nested = nested

    def update(self, x):
        return heads(x, self.nested)


class KerasHeads(keras.layers.Layer):
    def __init__(self, nested):
        super().__init__()
        self.nested = nested

    def call(self, x):
        return heads(x, self.nested)


MODULES = {
    "equinox": lambda nested: lambda x: EquinoxHeads(nested)(x),
    "nnx": lambda nested: lambda x: NnxHeads(nested)(x),
    "linen": lambda nested: lambda x: LinenHeads(nested).apply({}, x),
    "haiku": lambda nested: (
        lambda x: hk.transform(lambda x: HaikuHeads(nested)(x)).apply({}, None, x)
    ),
    "brainstate": lambda nested: lambda x: BrainstateHeads(nested)(x),
    "keras": lambda nested: lambda x: KerasHeads(nested)(x),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("framework", MODULES)
def test_keys_of_a_result_stay_in_the_order_of_the_module(framework, nested):
    module = MODULES[framework](nested)
    out, taps = tapax.capture(lambda x: weigh(module(x)))(X)
    assert_close(out, jnp.sin(X) + 2 * X**2)
    assert_close({name[-5:]: value for name, value in taps.values.items()}["first"], X**2)
    assert_close(tapax.edit(lambda x: weigh(module(x)), values={"**:*first": 0.0})(X), jnp.sin(X))


def test_keys_of_quantities_stay_in_the_order_of_the_module():
    class Quantities(brainstate.nn.Module):
        def update(self, x):
            return {"second": jnp.sin(x) * u.mV, "first": x**2 * u.mV}

    apply = lambda x: weigh(Quantities()(x)).mantissa
    out, taps = tapax.capture(apply)(X)
    assert_close(out, jnp.sin(X) + 2 * X**2)
    assert {*taps.values} == {"Quantities:second", "Quantities:first"}


@jax.tree_util.register_pytree_node_class
class Distribution:
    """A pytree node that declares no leaves, like some classes of other packages."""

    def __init__(self, mean):
        self.mean = mean

    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, data, children):
        return object.__new__(cls)


class Predictor(eqx.Module):
    def __call__(self, x):
        return [Distribution(jnp.sin(x)), x]

    def distribution(self, x):
        return Distribution(jnp.sin(x))


def test_nodes_without_leaves_are_returned_unchanged():
    method = lambda x: Predictor().distribution(x).mean
    assert_close(tapax.capture(lambda x: tapax.sow(method(x), "mean"))(X)[0], jnp.sin(X))
    beside = lambda x: Predictor()(x)[0].mean
    assert_close(tapax.capture(beside)(X)[0], jnp.sin(X))
    sown = lambda x: tapax.sow(Distribution(tapax.sow(jnp.sin(x), "mean")), "whole").mean
    assert_close(tapax.capture(sown)(X)[0], jnp.sin(X))
