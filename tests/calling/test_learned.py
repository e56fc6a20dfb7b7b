"""A capture written inside a loop is traced only once."""

import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

X = jnp.linspace(-1, 1, 6).reshape(2, 3)
traces: list[str] = []


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.factor = 2

    def __call__(self, x):
        traces.append("Net")
        self.calls[...] = self.calls[...] + 1
        return self.linear(x) * self.factor


@pytest.fixture(autouse=True)
def nothing_traced():
    traces.clear()


def test_a_module_is_traced_once():
    net = Net()
    for i in range(3):
        out, taps = tapax.capture(net)(X + i)
        assert_close(out, 2 * taps.values["Net/linear"])
        assert net.calls[...] == i + 1
    assert len(traces) == 1


def test_a_module_that_changed_is_traced_again():
    net = Net()
    first, _ = tapax.capture(net)(X)
    net.factor = 6
    second, _ = tapax.capture(net)(X)
    assert_close(second, 3 * first)
    net.linear.kernel[...] = 0 * net.linear.kernel[...]
    assert not tapax.capture(net)(X)[0].any()
    assert len(traces) == 2


def test_other_selections_are_other_captures():
    net = Net()
    assert list(tapax.capture(net, values="**/linear")(X)[1].values) == ["Net/linear"]
    assert list(tapax.capture(net, values="Net")(X)[1].values) == ["Net"]


@pytest.mark.parametrize("graph", [True, False])
def test_an_nnx_step_is_traced_once(graph):
    net = Net()
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    def loss(net, x):
        return jnp.mean(net(x) ** 2)

    if graph:

        @nnx.jit
        def step(net, optimizer, x):
            optimizer.update(net, nnx.grad(loss)(net, x))

        run = lambda: tapax.capture(step)(net, optimizer, X)[1].grads["Net/linear"]
    else:
        value = nnx.jit(loss, graph=False)
        run = lambda: tapax.capture(value)(net, X)[1].values["Net/linear"]
    for _ in range(3):
        assert run().shape == (2, 3)
    assert len(traces) == 1


def test_an_equinox_step_is_traced_once():
    net = eqx.nn.Linear(3, 3, key=jax.random.key(0))

    @eqx.filter_jit
    def forward(net, x):
        traces.append("forward")
        return net(x)

    for scale in (1.0, 2.0):
        scaled = eqx.tree_at(lambda n: n.weight, net, scale * net.weight)
        out, taps = tapax.capture(forward)(scaled, X[0])
        assert_close(taps.values["Linear"], scaled(X[0]))
        assert_close(out, scaled(X[0]))
    assert len(traces) == 1


def test_learned_facts_keep_nothing_alive():
    net = Net()
    tapax.capture(net)(X)
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None
