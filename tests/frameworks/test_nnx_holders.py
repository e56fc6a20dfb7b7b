"""NNX models that other objects hold: functions, methods, dataclasses, trainers."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

X = jnp.linspace(-1.0, 1.0, 32, dtype=jnp.float32).reshape(8, 4)


class Net(nnx.Module):
    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class Holder:
    def __init__(self, model: Any):
        self.model = model

    def __call__(self, x):
        return self.model(x)


@dataclasses.dataclass
class Unhashable:
    model: Any

    def __call__(self, x):
        return self.model(x)


@dataclasses.dataclass(slots=True)
class Slotted:
    model: Any

    def __call__(self, x):
        return self.model(x)


class Callback:
    def __init__(self, trainer: Any):
        self.trainer = trainer


class Trainer:
    def __init__(self, model: Any):
        self.model = model
        self.callback = Callback(self)

    def __call__(self, x):
        assert self.callback.trainer is self
        return self.callback.trainer.model(x)


Pair = collections.namedtuple("Pair", "model other")

HOLDERS = {
    "function": lambda model: lambda x: model(x),
    "method": lambda model: model.__call__,
    "partial": lambda model: functools.partial(lambda model, x: model(x), model),
    "object": Holder,
    "object in an object": lambda model: Holder(Holder(model)),
    "method of an object": lambda model: Holder(model).__call__,
    "function in an object": lambda model: Holder(lambda x: model(x)),
    "dataclass": Unhashable,
    "slots": Slotted,
    "cycle": Trainer,
    "named tuple": lambda model: (lambda pair: lambda x: pair.model(x))(Pair(model, 1)),
    "nested dict": lambda model: lambda x, held={"a": {"b": [model]}}: held["a"]["b"][0](x),
}


def _same(first: Any, second: Any) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert_close(first, second)


@pytest.mark.parametrize("where", ["argument", "captured"])
@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
def test_a_model_in_any_holder_is_not_a_constant(make, where):
    plain, model = Net(), Net()
    run, held = make(plain), make(model)
    look = tapax.capture(lambda held, x: held(x)) if where == "argument" else tapax.capture(held)
    for _ in range(3):
        out, taps = look(held, X) if where == "argument" else look(X)
        assert_close(taps.values["Net/linear"], plain.linear(X))
        _same(out, run(X))
        _same(nnx.state(model), nnx.state(plain))
        for net in plain, model:
            net.linear.kernel[...] *= 2


def test_attribute_of_an_argument_changed_between_calls():
    held = Holder(Net())
    look = tapax.capture(lambda held, x: held.model.linear(x) * held.scale)
    for held.scale in (1.0, 2.0, jnp.arange(4.0)):
        _same(look(held, X)[0], held.model.linear(X) * held.scale)


def test_train_step_of_an_object_that_holds_model_and_optimizer():
    class State:
        def __init__(self):
            self.model = Net()
            self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)

    def step(state, x):
        grads = nnx.grad(lambda model: jnp.sum(model(x)[:, 0] ** 3))(state.model)
        state.optimizer.update(state.model, grads)

    plain, state = State(), State()
    for _ in range(2):
        step(plain, X)
        _, taps = tapax.capture(step)(state, X)
        assert set(taps.grads) == {"Net", "Net/linear", "Net/norm"}
        # The gradient of the bias before the normalization is zero: its terms, of the size of the
        # other gradients, cancel. The remaining rounding error depends on the processor.
        assert_close(nnx.state(state.model), nnx.state(plain.model), scale=10)


def test_function_that_is_an_argument_is_traced_once():
    model, traces = Net(), []

    def run(held, x):
        traces.append(1)
        return held(x)

    look = tapax.capture(run)
    for held in (model.__call__, model.__call__, model.__call__):
        look(held, X)
    assert len(traces) == 1
