"""Single layers of a model that scans over its layers, selected by number."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import tapax
from tests.oracles.closeness import assert_close as close

LAYERS, WIDTH = 5, 4
X = jnp.asarray(np.random.default_rng(1).normal(size=(3, WIDTH)).astype(np.float32))


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.mlp(x))


class NNXStack(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(NNXBlock, in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)

    def __call__(self, x):
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return run(self.layers, x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + jnp.tanh(nn.Dense(WIDTH, name="mlp")(x)), None


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.remat(LinenBlock)
        axes, split = {"params": 0}, {"params": True}
        scanned = nn.scan(block, variable_axes=axes, split_rngs=split, length=LAYERS)
        return scanned(name="layers")(x, None)[0]


class EqxBlock(eqx.Module):
    mlp: eqx.nn.Linear

    def __init__(self, key):
        self.mlp = eqx.nn.Linear(WIDTH, WIDTH, dtype=X.dtype, key=key)

    def __call__(self, x):
        return x + jnp.tanh(jax.vmap(self.mlp)(x))


class EqxStack(eqx.Module):
    layers: EqxBlock

    def __init__(self, key):
        self.layers = eqx.filter_vmap(EqxBlock)(jax.random.split(key, LAYERS))

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        step = lambda x, block: (eqx.combine(block, static)(x), None)
        return lax.scan(step, x, arrays)[0]


class Case(NamedTuple):
    """A model as a function of parameters and rows, with the path and weights of its layers."""

    apply: Callable[..., Any]
    params: Any
    layers: str
    weights: tuple[Any, Any]
    grad: Callable[..., Any] = jax.grad

    def loss(self, params, x):
        return jnp.sum(self.apply(params, x) ** 2)


def of_nnx():
    model = NNXStack(nnx.Rngs(0))
    weights = model.layers.mlp.kernel[...], model.layers.mlp.bias[...]
    return Case(lambda model, x: model(x), model, "NNXStack/layers", weights, nnx.grad)


def of_linen():
    model = LinenStack()
    variables = model.init(jax.random.key(0), X)
    dense = variables["params"]["layers"]["mlp"]
    return Case(model.apply, variables, "LinenStack/layers", (dense["kernel"], dense["bias"]))


def of_equinox():
    model = EqxStack(jax.random.key(0))
    weights = model.layers.mlp.weight.swapaxes(1, 2), model.layers.mlp.bias
    return Case(lambda model, x: model(x), model, "EqxStack/layers", weights)


def of_haiku():
    def net(x):
        stack = hk.experimental.layer_stack(LAYERS, name="layers")
        return stack(lambda x: x + jnp.tanh(hk.Linear(WIDTH, name="mlp")(x)))(x)

    model = hk.without_apply_rng(hk.transform(net))
    params = model.init(jax.random.key(0), X)
    (linear,) = params.values()
    return Case(model.apply, params, "", (linear["w"], linear["b"]))


def of_plain_jax():
    rng = np.random.default_rng(0)
    shapes = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH)
    weights = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    def step(x, layer):
        kernel, bias = layer
        with tapax.scope("layers"):
            return x + jnp.tanh(tapax.sow(x @ kernel + bias, "mlp")), None

    return Case(lambda weights, x: lax.scan(step, x, weights)[0], weights, "layers", weights)


def unrolled(weights, x, zeros):
    """Run the stack without a loop, with zeros added to the result of each `mlp`; return both."""
    seen = []
    for kernel, bias, zero in zip(*weights, zeros, strict=True):
        seen.append(x @ kernel + bias + zero)
        x = x + jnp.tanh(seen[-1])
    return x, jnp.stack(seen)


MODELS = [of_nnx, of_linen, of_equinox, of_plain_jax]
ZEROS = jnp.zeros((LAYERS, *X.shape), X.dtype)


@pytest.mark.parametrize("make", MODELS)
def test_one_layer_equals_that_of_the_unrolled_model(make):
    case = make()
    loss = lambda zeros: jnp.sum(unrolled(case.weights, X, zeros)[0] ** 2)
    values, grads = unrolled(case.weights, X, ZEROS)[1], jax.grad(loss)(ZEROS)
    step = nnx.jit(nnx.grad(case.loss)) if make is of_nnx else jax.jit(jax.grad(case.loss))
    names = [f"{case.layers}/{i}/mlp" for i in (3, 0, 4)]
    _, taps = tapax.capture(step, values=names, grads=names)(case.params, X)
    assert list(taps.values) == list(taps.grads) == [f"{case.layers}/{i}/mlp" for i in (0, 3, 4)]
    for i in (0, 3, 4):
        name = f"{case.layers}/{i}/mlp"
        close(taps.values[name], values[i], 1e-5)
        close(taps.grads[name], grads[i], 1e-4)
        assert taps.sites[name].loops == ()


@pytest.mark.parametrize("make", MODELS)
def test_one_scanned_layer_is_edited(make):
    case = make()
    name = f"{case.layers}/3/mlp"

    def by_hand(weights, change):
        x = X
        for i, (kernel, bias) in enumerate(zip(*weights, strict=True)):
            h = x @ kernel + bias
            x = x + jnp.tanh(change(h) if i == 3 else h)
        return x

    for edit in (lambda h: 2 * h, jnp.ones_like(X), 0.5):
        change = edit if callable(edit) else lambda h: jnp.broadcast_to(edit, h.shape)  # noqa: B023
        edited = tapax.edit(case.apply, values={name: edit})
        close(edited(case.params, X), by_hand(case.weights, change), 1e-5)
        step = tapax.edit(case.grad(case.loss), values={name: edit})
        made = jax.tree.leaves(step(case.params, X))
        want = jax.grad(lambda w: jnp.sum(by_hand(w, change) ** 2))(case.weights)  # noqa: B023
        sizes = lambda xs: sorted(float(jnp.abs(x).sum()) for x in xs)
        close(sizes(made), sizes(want), 1e-4)


@pytest.mark.parametrize("make", [of_nnx, of_plain_jax])
def test_one_layer_is_perturbed_cut_and_differentiated(make):
    case = make()
    name, args = f"{case.layers}/2/mlp", (case.params, X)
    by_hand = lambda zeros: jnp.sum(unrolled(case.weights, X, zeros)[0] ** 2)
    want = jax.grad(by_hand)(ZEROS)[2]
    close(tapax.grad(case.loss, at=name)(*args)[name], want, 1e-4)
    found = tapax.perturbations(case.loss, at=name)(*args)
    assert {n: z.shape for n, z in found.items()} == {name: X.shape}
    close(jax.grad(tapax.perturbed(case.loss))(dict(found), *args)[name], want, 1e-4)
    moved = tapax.perturbed(case.loss)({name: jnp.ones_like(X)}, *args)
    close(moved, by_hand(ZEROS.at[2].set(1.0)), 1e-5)
    value = tapax.prefix(case.loss, name)(*args)
    close(value, unrolled(case.weights, X, ZEROS)[1][2], 1e-5)
    close(tapax.suffix(case.loss, name)(value, *args), case.loss(*args), 1e-5)


def test_an_edit_of_a_part_of_an_input_of_a_scanned_layer():
    case = of_nnx()
    one, all_layers = f"{case.layers}/3/mlp.input", f"{case.layers}/mlp.input"
    part = tapax.at(one, index=np.s_[:, -1])

    def by_hand(x):
        for i, (kernel, bias) in enumerate(zip(*case.weights, strict=True)):
            inner = x.at[:, -1].set(0.5) if i == 3 else x
            x = x + jnp.tanh(inner @ kernel + bias)
        return x

    edited = tapax.edit(case.apply, values={part: 0.5})
    close(edited(case.params, X), by_hand(X), 1e-5)
    step = nnx.jit(nnx.grad(case.loss))
    _, whole = tapax.capture(step, values=all_layers, grads=all_layers)(case.params, X)
    _, taps = tapax.capture(step, values={part: tapax.reduce.norm}, grads=part)(case.params, X)
    last = np.asarray(whole.values[all_layers])[3, :, -1]
    np.testing.assert_allclose(taps.values[one], np.linalg.norm(last), rtol=1e-5)
    close(taps.grads[one], whole.grads[all_layers][3, :, -1], 1e-6)


def test_layers_of_haiku_have_the_name_of_their_stack():
    case = of_haiku()
    (site,) = [s for s in tapax.sites(case.apply)(case.params, X) if s.path.endswith("mlp")]
    assert [layers.length for layers in site.layers] == [LAYERS]
    head = site.layers[0].path
    name = site.path.replace(head, f"{head}/3", 1)
    _, taps = tapax.capture(case.apply, values=name)(case.params, X)
    close(taps.values[name], unrolled(case.weights, X, ZEROS)[1][3], 1e-5)


def nested(x):
    """Run a loop over three layers, each of which runs a loop of two steps."""

    def layer(x, t):
        with tapax.scope("outer"):

            def step(x, u):
                with tapax.scope("inner"):
                    return tapax.sow(jnp.sin(x + 10 * t + u), "h"), None

            return lax.scan(step, x, jnp.arange(2, dtype=x.dtype))

    return lax.scan(layer, x, jnp.arange(3, dtype=x.dtype))[0]


def test_layers_inside_of_layers_are_numbered():
    _, whole = tapax.capture(nested)(X)
    h = whole.values["outer/inner/h"]
    for name, want in {
        "outer/1/inner/h": h[1],
        "outer/inner/1/h": h[:, 1],
        "outer/2/inner/0/h": h[2, 0],
        "**/inner/0/*": h[:, 0],
    }.items():
        _, taps = tapax.capture(nested, values=name)(X)
        ((_, got),) = taps.values.items()
        np.testing.assert_array_equal(got, want)
    part = tapax.at("outer/1/inner/h", step=1)
    _, taps = tapax.capture(nested, values=part)(X)
    np.testing.assert_array_equal(taps.values["outer/1/inner/h"], h[1, 1])
    edited = tapax.edit(nested, values={"outer/2/inner/0/h": 0.0})(X)
    np.testing.assert_allclose(edited, jnp.sin(jnp.full_like(X, 21.0)), rtol=1e-5)
    edited = tapax.edit(nested, values={"outer/1/inner/h": 0.0})(X)
    want = jnp.sin(jnp.sin(jnp.full_like(X, 20.0)) + 21.0)
    np.testing.assert_allclose(edited, want, rtol=1e-4)


def test_layers_in_a_loop_over_batches_belong_to_the_inner_loop():
    ts = jnp.arange(1, 4, dtype=X.dtype)

    def layer(x, t):
        with tapax.scope("layers"):
            return tapax.sow(jnp.sin(x * t), "h"), None

    def batches(xs):
        return lax.scan(lambda _, x: (None, lax.scan(layer, x, ts)[0]), None, xs)[1]

    def by_hand(x, edit=lambda h, i: h):
        hs = []
        for i, t in enumerate(ts):
            hs.append(edit(jnp.sin(x * t), i))
            x = hs[-1]
        return hs

    xs = X[:2]  # fewer batches than layers, so some layer numbers are not batch numbers
    for i in range(3):
        name = f"layers/{i}/h"
        _, taps = tapax.capture(batches, values=[name, "layers/h"])(xs)
        close(taps.values[name], jnp.stack([by_hand(x)[i] for x in xs]))
        assert taps.values["layers/h"].shape == (2, 3, WIDTH)
        edited = tapax.edit(batches, values={name: 0.5})(xs)
        half = lambda h, k, i=i: jnp.full_like(h, 0.5) if k == i else h
        close(edited, jnp.stack([by_hand(x, half)[-1] for x in xs]))
        second = tapax.capture(batches, values=tapax.at(name, step=1))(xs)[1].values[name]
        close(second, by_hand(xs[1])[i])


def test_totals_of_one_layer_are_reduced():
    reduced = {"outer/1/inner/h": tapax.reduce.minmax.total}
    _, taps = tapax.capture(nested, values=reduced)(X)
    h = tapax.capture(nested)(X)[1].values["outer/inner/h"][1]
    np.testing.assert_allclose(taps.values["outer/1/inner/h"], [h.min(), h.max()], rtol=1e-6)


def test_a_layer_that_does_not_exist_is_refused():
    case = of_plain_jax()
    args = case.params, X
    for call in (
        lambda: tapax.capture(case.apply, values="layers/5/mlp")(*args),
        lambda: tapax.capture(jax.grad(case.loss), grads="layers/9/*")(*args),
        lambda: tapax.edit(case.apply, values={"layers/9/mlp": 0.0})(*args),
        lambda: tapax.grad(case.loss, at="layers/9/mlp")(*args),
    ):
        with pytest.raises(tapax.SiteError) as caught:
            call()
        assert str(caught.value).endswith(
            "picks nothing: 'layers' has 5 layers in a loop, numbered 0 to 4."
        )


def test_numbers_of_unrolled_layers_select_unrolled_layers():
    def step(x, _):
        for i in range(2):
            with tapax.scope(f"blocks/{i}"):
                x = tapax.sow(jnp.sin(x), "h")
        return x, None

    f = lambda x: lax.scan(step, x, None, length=3)[0]
    _, taps = tapax.capture(f, values="blocks/1/h")(X)
    assert {name: x.shape for name, x in taps.values.items()} == {"blocks/1/h": (3, *X.shape)}
    _, taps = tapax.capture(f, values="**/1/**")(X)
    assert list(taps.values) == ["blocks/1/h"]


@pytest.mark.parametrize("glob", ["Stack/layers/*/mlp", "**/1/mlp", "*/layers/?/mlp"])
def test_a_glob_for_the_numbers_of_scanned_layers_says_what_to_write(glob):
    def stack(x):
        def layer(x, t):
            with tapax.scope("layers"):
                return tapax.sow(x * t, "mlp"), None

        with tapax.scope("Stack"):
            return jax.lax.scan(layer, x, jnp.arange(1, 4, dtype=X.dtype))[0]

    with pytest.raises(tapax.SiteError, match="the layers are in a loop: 'Stack/layers/mlp' picks"):
        tapax.capture(stack, values=glob)(X)
