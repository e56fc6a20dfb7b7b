"""Modules in dataclasses, and in objects of NNX that are not modules, have paths."""

import dataclasses

import brainstate
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

X = np.linspace(-1.0, 1.0, 3, dtype=np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    up: object
    down: object


class PairObject(nnx.Pytree):
    def __init__(self, up, down):
        self.up, self.down = up, down


class NNXNet(nnx.Module):
    def __init__(self, container):
        layers = [nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2)]
        self.pair = nnx.data(container(*layers))

    def __call__(self, x):
        return self.pair.down(jnp.tanh(self.pair.up(x)))


class EquinoxNet(eqx.Module):
    pair: Pair

    def __call__(self, x):
        return self.pair.down(jnp.tanh(self.pair.up(x)))


class BrainstatePair(brainstate.graph.Node):
    def __init__(self, up, down):
        self.up, self.down = up, down


class BrainstateNet(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = BrainstatePair(*(brainstate.nn.Linear(3, 3) for _ in range(2)))

    def update(self, x):
        return self.pair.down(jnp.tanh(self.pair.up(x)))


def make_equinox():
    return EquinoxNet(Pair(*(eqx.nn.Linear(3, 3, key=jax.random.key(i)) for i in range(2))))


MAKERS = {
    "nnx, dataclass": lambda: NNXNet(Pair),
    "nnx, object": lambda: NNXNet(PairObject),
    "equinox": make_equinox,
    "brainstate": BrainstateNet,
}


@pytest.mark.parametrize("name", MAKERS)
def test_modules_in_containers_of_attributes_have_paths(name):
    model = MAKERS[name]()
    root = type(model).__name__
    paths = [f"{root}/pair/up", f"{root}/pair/down"]
    assert {*dict(tapax.modules(model))} == {root, *paths}
    plain = lambda model, x: model(x)
    for fn in (plain,) if name == "brainstate" else (plain, jax.jit(plain)):
        out, taps = tapax.capture(fn)(model, X)
        assert list(taps.values) == [*paths, root]
        assert_close(taps.values[paths[0]], model.pair.up(X))
        assert_close(out, model(X))
    edited = tapax.edit(lambda model, x: model(x), values={paths[0]: 0.0})
    assert_close(edited(model, X), model.pair.down(jnp.zeros(3)))


def test_a_dataclass_that_contains_itself_is_searched_once():
    @dataclasses.dataclass(eq=False)
    class Node:
        layer: object
        other: object = None

    class Net(nn.Module):
        node: object

        def __call__(self, x):
            return self.node.layer * x

    node = Node(2.0)
    node.other = node
    model = Net(node)
    out, taps = tapax.capture(lambda x: model.apply({}, x))(X)
    assert_close(out, 2 * X)
    assert list(taps.values) == ["Net"]
