"""Captures of NNX leave no tracer behind and keep nothing alive from call to call."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import tapax
from tapax.compat.nnx import capture
from tests.oracles.memory import assert_nothing_stays

pytestmark = pytest.mark.once

X = jnp.arange(6.0).reshape(2, 3) / 7


class Net(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        h = self.perturb("p", nnx.relu(self.layer(x)))
        self.sow(nnx.Intermediate, "h", h)
        self.sow(nnx.Intermediate, "total", h, reduce_fn=jnp.add, init_fn=lambda: 0.0)
        return jnp.sum(h**2)


class Owner:
    """An object that assigns an attribute during a capture."""

    def __init__(self, model):
        self.model = model

    def step(self, x):
        self.last = self.model(x)
        return self.last


def calls_of_nnx():
    model = Net()
    loss = lambda model, x: model(x)
    scanned = lambda model, x: lax.scan(lambda c, _: (model(c), None), x, length=3)[0]
    sown = lambda model, x: capture(model, nnx.Intermediate)(x)[0]
    return {
        "drop-in": lambda: sown(model, X),
        "drop-in in jit": lambda: nnx.jit(sown)(model, X),
        "drop-in in grad": lambda: nnx.grad(sown)(model, X),
        "argument": lambda: tapax.capture(loss)(model, X),
        "model": lambda: tapax.capture(model)(X),
        "closed over": lambda: tapax.capture(lambda x: model(x))(X),
        "method": lambda: tapax.capture(Owner(model).step)(X),
        "grad": lambda: tapax.capture(nnx.grad(loss))(model, X),
        "jitted grad": lambda: tapax.capture(nnx.jit(nnx.grad(loss)))(model, X),
        "gradients": lambda: tapax.grad(loss)(model, X),
        "scan": lambda: tapax.capture(scanned)(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), X),
        "edit": lambda: tapax.edit(loss, values={"Net/layer": lambda h: 2 * h})(model, X),
        "sites": lambda: tapax.sites(loss)(model, X),
    }


@pytest.mark.many
@pytest.mark.parametrize("name", calls_of_nnx())
def test_no_tracer_leaks_from_a_capture(name):
    call = calls_of_nnx()[name]
    with jax.check_tracer_leaks():
        call()
        call()


@pytest.mark.parametrize("name", calls_of_nnx())
def test_nothing_stays_alive_from_capture_to_capture(name):
    assert_nothing_stays(calls_of_nnx()[name], "Net", "NNXRecordOptions")
