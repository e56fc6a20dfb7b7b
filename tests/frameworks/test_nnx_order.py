"""The attributes of NNX objects keep the user's order, inside a captured call and after it."""

import jax.numpy as jnp
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([[0.3, -0.7]], jnp.float32)


class Chain(nnx.Module):
    """A module that calls its parts in the order of its arguments."""

    def __init__(self, *names, rngs):
        self.parts = nnx.Dict({name: nnx.Linear(2, 2, rngs=rngs) for name in names})
        self.after = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        for name in self.parts:
            x = jnp.sin(self.parts[name](x))
        return x


def chain(*names):
    return Chain(*names, rngs=nnx.Rngs(0))


WAYS = {
    "capture": lambda fn: lambda *args: tapax.capture(fn)(*args)[0],
    "edit": lambda fn: tapax.edit(fn, values={"**": lambda x: x}),
    "suffix": lambda fn: lambda *args: tapax.value_and_grad(lambda *a: fn(*a).sum())(*args)[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_goes_through_its_parts_in_the_order_given(way):
    model = chain("second", "first", "third")
    apply = lambda model, x: model(x)
    expected = apply(model, X)
    out = WAYS[way](apply)(model, X)
    assert_close(out, expected if way != "suffix" else expected.sum())
    closed = WAYS[way](lambda x: model(x))(X)
    assert_close(closed, expected if way != "suffix" else expected.sum())
    assert list(model.parts) == ["second", "first", "third"]


def test_models_that_differ_in_the_order_alone_are_traced_apart():
    apply = lambda model, x: model(x)
    captured = tapax.capture(apply)
    one, other = chain("a", "b"), chain("a", "b")
    other.parts = nnx.Dict(b=other.parts["b"], a=other.parts["a"])
    assert_close(captured(one, X)[0], one(X))
    assert_close(captured(other, X)[0], other(X))
    assert abs(one(X) - other(X)).max() > 1e-3


def test_objects_that_get_new_attributes_keep_the_order_of_the_old():
    def step(model, x):
        model.count = nnx.Param(jnp.zeros(()))
        model.parts["last"] = nnx.Param(x)
        return model.after(x)

    model = chain("second", "first")
    before = list(vars(model))
    tapax.capture(step)(model, X)
    assert list(model.parts) == ["second", "first", "last"]
    assert list(vars(model)) == [*before, "count"]


MODEL = chain("second", "first")


class Runner:
    def run(self, x):
        graph, state = nnx.split(MODEL)
        return nnx.merge(graph, state)(x)


def test_a_model_that_only_a_method_refers_to():
    runner = Runner()
    expected = runner.run(X)
    for fn in (runner.run, lambda x: runner.run(x)):
        out, taps = tapax.capture(fn)(X)
        assert_close(out, expected)
        assert len(taps.values) == 3
