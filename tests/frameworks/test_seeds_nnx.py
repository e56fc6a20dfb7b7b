"""The examples in the documentation of NNX from which tapax grew, as written and with tapax.

Each example runs with Flax as written, with its warnings, and then with tapax; the results
agree.
"""
# ruff: noqa: RET504

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tapax
from tapax.compat.nnx import capture
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

deprecated = pytest.warns(DeprecationWarning, match=r"outside of 'nnx\.capture\(\)' is deprecated")


def test_perturb_example_of_the_seed():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear1 = nnx.Linear(2, 3, rngs=rngs)
            self.linear2 = nnx.Linear(3, 4, rngs=rngs)

        def __call__(self, x):
            x = self.linear1(x)
            x = self.perturb("xgrad", x)
            x = self.linear2(x)
            return x

    x = jnp.ones((1, 2))
    y = jnp.ones((1, 4))
    model = Model(rngs=nnx.Rngs(0))
    assert not hasattr(model, "xgrad")
    with deprecated:
        _ = model(x)
    assert model.xgrad.shape == (1, 3)
    graphdef, params, perturbations = nnx.split(model, nnx.Param, nnx.Perturbation)

    @nnx.grad(argnums=(0, 1))
    def grad_loss(params, perturbations, inputs, targets):
        model = nnx.merge(graphdef, params, perturbations)
        return jnp.mean((model(inputs) - targets) ** 2)

    with deprecated:
        (grads, perturbations) = grad_loss(params, perturbations, x, y)
    assert not jnp.array_equal(perturbations.xgrad[...], jnp.zeros((1, 3)))

    @nnx.jit
    def step(model, inputs, targets):
        return nnx.grad(lambda m: jnp.mean((m(inputs) - targets) ** 2))(model)

    fresh = Model(rngs=nnx.Rngs(0))
    found, taps = tapax.capture(step)(fresh, x, y)  # no sample input, no split, no second argument
    assert_close(taps.grads["Model/xgrad"], perturbations.xgrad[...])
    assert_close(taps.grads["Model/linear1"], perturbations.xgrad[...])  # and no mark
    for name in ("linear1", "linear2"):
        assert_close(found[name].kernel[...], grads[name].kernel[...])
    assert not hasattr(fresh, "xgrad")
    # A capture of the unchanged program leaves the stored attribute of the model unchanged.
    again, taps = tapax.capture(grad_loss)(params, nnx.state(model, nnx.Perturbation), x, y)
    assert_close(again[1].xgrad[...], perturbations.xgrad[...])
    assert_close(taps.grads["Model/xgrad"], perturbations.xgrad[...])


def test_sow_example_of_the_seed():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear1 = nnx.Linear(2, 3, rngs=rngs)
            self.linear2 = nnx.Linear(3, 4, rngs=rngs)

        def __call__(self, x, add=0):
            x = self.linear1(x)
            self.sow(nnx.Intermediate, "i", x + add)
            x = self.linear2(x)
            return x

    x = jnp.ones((1, 2))
    model = Model(rngs=nnx.Rngs(0))
    assert not hasattr(model, "i")
    with deprecated:
        y = model(x)
    assert hasattr(model, "i")
    assert len(model.i) == 1
    assert model.i[0].shape == (1, 3)
    with deprecated:
        y = model(x, add=1)
    assert len(model.i) == 2
    assert (model.i[0] + 1 == model.i[1]).all()

    def twice(model, x):
        model(x)
        return model(x, add=1)

    fresh = Model(rngs=nnx.Rngs(0))
    for net in (fresh, model):  # a model with the attribute does not grow either
        held = len(net.i) if hasattr(net, "i") else None
        out, taps = tapax.capture(twice)(net, x)
        assert_close(out, y)
        assert_close(taps.values["Model/i"], model.i[0])
        assert_close(taps.values["Model/i@1"], model.i[1])
        assert (len(net.i) if hasattr(net, "i") else None) == held


def test_sow_with_reducers():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear1 = nnx.Linear(2, 3, rngs=rngs)
            self.linear2 = nnx.Linear(3, 4, rngs=rngs)

        def __call__(self, x):
            x = self.linear1(x)
            self.sow(
                nnx.Intermediate,
                "sum",
                x,
                init_fn=lambda: 0,
                reduce_fn=lambda prev, curr: prev + curr,
            )
            self.sow(
                nnx.Intermediate,
                "product",
                x,
                init_fn=lambda: 1,
                reduce_fn=lambda prev, curr: prev * curr,
            )
            x = self.linear2(x)
            return x

    x = jnp.ones((1, 2))
    model = Model(rngs=nnx.Rngs(0))
    with deprecated:
        y = model(x)
    assert (model.sum[...] == model.product[...]).all()
    intermediate = model.sum[...]
    with deprecated:
        y = model(x)
    assert (model.sum[...] == intermediate * 2).all()
    assert (model.product[...] == intermediate**2).all()

    fresh = Model(rngs=nnx.Rngs(0))
    out, taps = tapax.capture(fresh)(x)
    assert_close(taps.values["Model/sum"], intermediate)
    out, taps = tapax.capture(lambda m, x: (m(x), m(x))[1])(fresh, x)
    assert_close(out, y)
    assert_close(taps.values["Model/sum"], model.sum[...])
    assert_close(taps.values["Model/product"], model.product[...])
    assert not hasattr(fresh, "sum")


@pytest.mark.parametrize("capture_", [nnx.capture, capture], ids=["flax", "tapax"])
def test_perturb_in_four_steps(capture_):
    class Model(nnx.Module):
        def __call__(self, x):
            x2 = self.perturb("grad_of_x", x)
            return 3 * x2

    model = Model()
    x = 1.0
    forward = capture_(model, nnx.Perturbation)
    _, perturbations = forward(x)

    def train_step(model, perturbations, x):
        def loss(model, perturbations, x):
            return capture_(model, nnx.Intermediate, init=perturbations)(x)

        (grads, perturb_grads), sowed = nnx.grad(loss, argnums=(0, 1), has_aux=True)(
            model, perturbations, x
        )
        return nnx.merge_state(perturb_grads, sowed)

    metrics = train_step(model, perturbations, x)
    assert float(metrics["grad_of_x"][...]) == 3.0
    _, taps = tapax.capture(jax.grad(lambda x: model(x)))(x)
    assert float(taps.grads["Model/grad_of_x"]) == 3.0


@pytest.mark.parametrize("capture_", [nnx.capture, capture], ids=["flax", "tapax"])
def test_sow_with_capture(capture_):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear1 = nnx.Linear(2, 3, rngs=rngs)
            self.linear2 = nnx.Linear(3, 4, rngs=rngs)

        def __call__(self, x):
            x = self.linear1(x)
            self.sow(nnx.Intermediate, "features", x)
            x = self.linear2(x)
            return x

    model = Model(rngs=nnx.Rngs(0))

    @capture_(nnx.Intermediate)
    def forward(model, x):
        return model(x)

    result, intermediates = forward(model, jnp.ones(2))
    assert "features" in intermediates
    out, taps = tapax.capture(model)(jnp.ones(2))
    assert_close(out, result)
    assert_close(taps.values["Model/features"], intermediates["features"][0])


@pytest.mark.parametrize("capture_", [nnx.capture, capture], ids=["flax", "tapax"])
def test_custom_reducer_with_capture(capture_):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 3, rngs=rngs)

        def __call__(self, x):
            x = self.linear(x)
            self.sow(
                nnx.Intermediate,
                "sum",
                x,
                init_fn=lambda: 0,
                reduce_fn=lambda prev, curr: prev + curr,
            )
            return x

    model, x = Model(rngs=nnx.Rngs(0)), jnp.ones(2)
    twice = lambda m, x: m(x) + m(2 * x)
    _, state = capture_(twice, nnx.Intermediate)(model, x)
    _, taps = tapax.capture(twice)(model, x)
    assert_close(state["sum"][...], model.linear(x) + model.linear(2 * x))
    assert_close(taps.values["Model/sum"], state["sum"][...])


def block(**kwargs):
    class Block(nnx.Module):
        def __init__(self, din, dout, *, rngs: nnx.Rngs):
            self.linear = nnx.Linear(din, dout, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, **kwargs.get("dropout", {}))
            self.batch_norm = nnx.BatchNorm(10, **kwargs.get("batch_norm", {}), rngs=rngs)

        def __call__(self, x, rngs=None):
            return self.batch_norm(self.dropout(self.linear(x), rngs=rngs))

    return Block


def mode(block):
    return block.dropout.deterministic, block.batch_norm.use_running_average


def test_train_and_eval():
    made = block()(2, 5, rngs=nnx.Rngs(0))
    assert mode(made) == (False, False)
    made.eval()
    assert mode(made) == (True, True)
    off = {"dropout": {"deterministic": True}, "batch_norm": {"use_running_average": True}}
    made = block(**off)(2, 5, rngs=nnx.Rngs(0))
    assert mode(made) == (True, True)
    made.train()
    assert mode(made) == (False, False)


def test_train_and_eval_under_capture():
    """The captured function sees the mode, may change it, and the change persists."""
    model, x = block()(2, 10, rngs=nnx.Rngs(0)), jnp.ones((4, 2), jnp.float32)
    captured = tapax.capture(lambda m, x: m(x, nnx.Rngs(1)))
    _, taps = captured(model, x)
    assert np.any(np.asarray(taps.values["Block/dropout"]) == 0)
    model.eval()
    out, taps = captured(model, x)
    assert_close(taps.values["Block/dropout"], taps.values["Block/linear"])
    assert_close(out, model(x))

    def back(m, x):
        m.train()
        return m(x, nnx.Rngs(1))

    tapax.capture(back)(model, x)
    assert mode(model) == (False, False)


def test_set_attributes_example_of_the_seed():
    cls = block(dropout={"deterministic": False}, batch_norm={"use_running_average": False})
    made = cls(2, 5, rngs=nnx.Rngs(0))
    assert mode(made) == (False, False)
    made.set_attributes(deterministic=True, use_running_average=True)
    assert mode(made) == (True, True)
    made = cls(2, 5, rngs=nnx.Rngs(0))
    made.set_attributes(nnx.Dropout, deterministic=True)
    assert mode(made) == (True, False)
    with pytest.raises(ValueError, match="nonsense"):
        made.set_attributes(nonsense=1)

    def change(m, x):
        m.set_attributes(nnx.Dropout, deterministic=False)
        return m.linear(x)

    tapax.capture(change)(made, jnp.ones((1, 2)))
    assert mode(made) == (False, False)


def test_iter_modules_and_children():
    class SubModule(nnx.Module):
        def __init__(self, din, dout, rngs):
            self.linear1 = nnx.Linear(din, dout, rngs=rngs)
            self.linear2 = nnx.Linear(din, dout, rngs=rngs)

        def __call__(self, x):
            return self.linear1(x) + self.linear2(x)

    class Block(nnx.Module):
        def __init__(self, din, dout, *, rngs: nnx.Rngs):
            self.linear = nnx.Linear(din, dout, rngs=rngs)
            self.submodule = SubModule(din, dout, rngs=rngs)
            self.dropout = nnx.Dropout(0.5)
            self.batch_norm = nnx.BatchNorm(10, rngs=rngs)

        def __call__(self, x, rngs):
            return self.batch_norm(self.dropout(self.linear(x) + self.submodule(x), rngs=rngs))

    model = Block(2, 10, rngs=nnx.Rngs(0))
    paths = {path: type(module).__name__ for path, module in nnx.iter_modules(model)}
    assert paths == {
        ("batch_norm",): "BatchNorm",
        ("dropout",): "Dropout",
        ("linear",): "Linear",
        ("submodule", "linear1"): "Linear",
        ("submodule", "linear2"): "Linear",
        ("submodule",): "SubModule",
        (): "Block",
    }
    children = dict(nnx.iter_children(model))
    assert set(children) == {"batch_norm", "dropout", "linear", "submodule"}
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        assert dict(model.iter_modules()).keys() == paths.keys()
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        assert dict(model.iter_children()).keys() == children.keys()
    # Every module that NNX lists is a site, with its class, under the same path.
    sites = tapax.sites(model)(jnp.ones((3, 2), jnp.float32), nnx.Rngs(0))
    found = {tuple(site.path.split("/")[1:]): site.module.__name__ for site in sites}
    assert found == paths
