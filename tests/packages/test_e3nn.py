"""Equivariant layers of e3nn-jax in Haiku, Linen and Equinox, which return arrays with irreps."""

import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.oracles import by_hand, hooks
from tests.oracles.closeness import assert_close

with warnings.catch_warnings():  # of Python, at the import
    warnings.simplefilter("ignore", DeprecationWarning)
    import e3nn_jax as e3nn

KEY = jax.random.key(0)
IN, MIDDLE, OUT = "2x0e + 1o", "3x0e + 2x1o", "0e + 1o"


@pytest.fixture(scope="module")
def inputs():
    x = e3nn.normal(IN, KEY, (4,))
    position = e3nn.normal("1o", jax.random.key(1), (4,))
    return x, position


def energy(out):
    return jnp.sum(out.array**2) + jnp.sum(out.filter("0e").array)


def haiku_model(mark=by_hand.unmarked):
    def forward(x, position):
        sh = e3nn.spherical_harmonics("1x0e + 1x1o", position, normalize=False)
        h = e3nn.haiku.FullyConnectedTensorProduct(MIDDLE)(x, sh)
        h = mark(h, "product")
        h = e3nn.scalar_activation(h, [jax.nn.gelu, None])
        return e3nn.haiku.Linear(OUT, name="out")(h)

    return hk.without_apply_rng(hk.transform(forward))


def haiku_loss(params, inputs, mark=by_hand.unmarked):
    return energy(haiku_model(mark).apply(params, *inputs))


@pytest.mark.many
def test_tensor_product_of_haiku_agrees_with_interceptors(inputs):
    params = haiku_model().init(KEY, *inputs)
    values, grads = hooks.of_haiku().grads(lambda: haiku_loss(params, inputs))
    step = jax.jit(jax.value_and_grad(haiku_loss))
    out, taps = tapax.capture(step)(params, inputs)
    assert_close(out, step(params, inputs))
    assert_close(dict(taps.values), values)
    assert_close(dict(taps.grads), grads)


def rotated(inputs, angles):
    return tuple(x.transform_by_angles(*angles) for x in inputs)


def test_a_captured_value_turns_with_the_input(inputs):
    """A site has only the array; with its irreps it is as equivariant as the layer."""
    params, angles = haiku_model().init(KEY, *inputs), (0.3, -0.5, 1.1)
    loss = jax.jit(jax.value_and_grad(lambda p, x: haiku_loss(p, x, tapax.sow)))
    _, taps = tapax.capture(loss)(params, inputs)
    _, turned = tapax.capture(loss)(params, rotated(inputs, angles))
    for before, after in ((taps.values, turned.values), (taps.grads, turned.grads)):
        for name, irreps in {"product:0": MIDDLE, "out:0": OUT}.items():
            expected = e3nn.IrrepsArray(irreps, before[name]).transform_by_angles(*angles)
            assert_close(after[name], expected.array)


def test_the_linear_layer_mixes_copies_of_one_irrep(inputs):
    params = haiku_model().init(KEY, *inputs)
    _, taps = tapax.capture(haiku_model(tapax.sow).apply)(params, *inputs)
    h = np.asarray(taps.values["product:0"])
    points, weights = np.polynomial.hermite_e.hermegauss(99)
    second_moment = np.sum(weights * jax.nn.gelu(points) ** 2) / weights.sum()
    scalars = jax.nn.gelu(h[:, :3]) / np.sqrt(second_moment)
    vectors = h[:, 3:].reshape(4, 2, 3)
    w = {name[-9:]: weight for name, weight in params["out"].items()}
    mixed = [
        scalars @ w["3x0e,1x0e"] / np.sqrt(3),
        np.einsum("nui,uv->nvi", vectors, w["2x1o,1x1o"] / np.sqrt(2))[:, 0],
    ]
    assert_close(taps.values["out:0"], np.concatenate(mixed, axis=1), 1e-3)


def test_gradients_inside_a_tensor_product_agree_with_differences(inputs):
    with jax.enable_x64(True):
        args = haiku_model().init(KEY, *inputs), inputs
        args = jax.tree.map(lambda x: x.astype(jnp.float64), args)
        marked = lambda *args: haiku_loss(*args, tapax.sow)
        grads = tapax.grad(marked, at="product:0")(*args)

        @jax.jit
        def shifted(delta, args):
            add = lambda h, name: h + e3nn.IrrepsArray(h.irreps, delta)
            return haiku_loss(*args, add)

        expected = by_hand.differences(lambda delta: shifted(delta, args), np.zeros((4, 9)))
        assert_close(grads["product:0"], expected, 1e-7)


def test_edit_without_vectors_leaves_no_vectors(inputs):
    params = haiku_model().init(KEY, *inputs)
    run = jax.jit(lambda p, x: haiku_model(tapax.sow).apply(p, *x))
    edited = tapax.edit(run, values={"product:0": lambda h: h.at[:, 3:].set(0.0)})(params, inputs)
    by = lambda h, name: e3nn.concatenate([h.filter("0e"), 0 * h.filter("1o")])
    assert_close(edited, haiku_model(by).apply(params, *inputs))
    assert (edited.filter("1o").array == 0).all() and edited.irreps == OUT


def test_operations_of_a_tensor_product_can_be_sites(inputs):
    """e3nn computes its constants during tracing, in `jax.ensure_compile_time_eval`."""
    params = haiku_model().init(KEY, *inputs)
    step = jax.jit(jax.value_and_grad(haiku_loss))
    out, taps = tapax.capture(step, values=tapax.ops("dot_general"), grads=None)(params, inputs)
    assert_close(out, step(params, inputs))
    weights = sum(len(layer) for layer in params.values())
    assert len([name for name in taps.values if name.startswith("out/")]) == 2
    assert len(taps.values) > weights
    linear = taps.values["out/dot_general@1"]  # of the vectors
    _, sown = tapax.capture(haiku_model().apply)(params, *inputs)
    assert_close(linear[:, 0] / np.sqrt(2), sown.values["out:0"][:, 1:])


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x, position):
        h = e3nn.tensor_product(x, e3nn.spherical_harmonics("0e + 1o", position, True))
        h = e3nn.flax.Linear(MIDDLE, name="mix")(h)
        h = e3nn.norm_activation(h, [jax.nn.tanh, jax.nn.tanh])
        gates = e3nn.flax.MultiLayerPerceptron((8, 2), jax.nn.silu, name="mlp")(h.filter("0e"))
        return e3nn.flax.Linear(OUT, name="out")(gates.array[..., :1] * h)


def test_layers_of_linen_agree_with_interceptors(inputs):
    model = LinenModel()
    variables = model.init(KEY, *inputs)
    loss = lambda variables, inputs: energy(model.apply(variables, *inputs))
    values, grads = hooks.of_linen("LinenModel").grads(lambda: loss(variables, inputs))
    step = jax.jit(jax.value_and_grad(loss))
    out, taps = tapax.capture(step)(variables, inputs)
    assert_close(out, step(variables, inputs))
    assert_close(dict(taps.values), values)
    assert_close(dict(taps.grads), grads)


class EquinoxModel(eqx.Module):
    mix: eqx.Module
    out: eqx.Module

    def __init__(self, key):
        first, second = jax.random.split(key)
        products = e3nn.tensor_product(e3nn.Irreps(IN), e3nn.Irreps("0e + 1o")).regroup()
        self.mix = e3nn.equinox.Linear(irreps_in=products, irreps_out=MIDDLE, key=first)
        self.out = e3nn.equinox.Linear(irreps_in=MIDDLE, irreps_out=OUT, key=second)

    def __call__(self, x, position):
        sh = e3nn.spherical_harmonics("0e + 1o", position, True)
        h = self.mix(e3nn.tensor_product(x, sh).regroup())
        return self.out(e3nn.scalar_activation(h, [jax.nn.gelu, None]))


def test_layers_of_equinox_agree_with_replaced_methods(inputs):
    params, static = eqx.partition(EquinoxModel(KEY), eqx.is_inexact_array)
    model = eqx.combine(params, static)
    parts = {"EquinoxModel": model, "EquinoxModel/mix": model.mix, "EquinoxModel/out": model.out}
    paths = {id(module): (module, path) for path, module in parts.items()}
    assert dict(tapax.modules(model)) == {path: type(module) for path, module in parts.items()}
    inputs = tuple(x[0] for x in inputs)
    loss = lambda model, inputs: energy(model(*inputs))
    values, grads = hooks.of_objects(paths).grads(lambda: loss(model, inputs))
    step = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    out, taps = tapax.capture(step)(model, inputs)
    assert_close(out, step(model, inputs))
    assert_close(dict(taps.values), values)
    assert_close(dict(taps.grads), grads)


def test_search_finds_the_derivative_of_a_norm_at_the_origin(inputs):
    params, (x, position) = haiku_model().init(KEY, *inputs), inputs

    def loss(position, x):
        length = jnp.linalg.norm(position.array, axis=-1)
        return jnp.sum(length) + haiku_loss(params, (x, position))

    search = tapax.find_nonfinite(jax.jit(jax.value_and_grad(loss)))
    assert search(position, x) is None
    found = search(e3nn.IrrepsArray("1o", position.array.at[2].set(0.0)), x)
    assert (found.phase, found.operation, found.kind) == ("backward", "div", "inf")
    assert found.index == (2,) and __file__ in found.source
