"""The inputs of modules are sites only if a selection asks for them."""

import brainstate
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close as close

X = jnp.asarray(np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32))
MASK = jnp.array([1.0, 0.0, 1.0, 1.0])
RNG = np.random.default_rng(3)
UP, DOWN = (RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(2))


def by_hand(x, zero=0.0, change=lambda h: h):
    """Run two matrices with a tanh between; change the input of the second, with zeros added."""
    h = change(jnp.tanh(x @ UP) + zero)
    return h @ DOWN


class NNXLayer(nnx.Module):
    def __init__(self, kernel):
        self.kernel = nnx.Param(jnp.asarray(kernel))

    def __call__(self, x):
        return x @ self.kernel[...]


class NNXNet(nnx.Module):
    def __init__(self):
        self.up, self.down = NNXLayer(UP), NNXLayer(DOWN)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class LinenLayer(nn.Module):
    kernel: str

    @nn.compact
    def __call__(self, x):
        kernel = {"up": UP, "down": DOWN}[self.kernel]
        return x @ self.param("kernel", lambda _: jnp.asarray(kernel))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenLayer("down", name="down")(jnp.tanh(LinenLayer("up", name="up")(x)))


class EqxLayer(eqx.Module):
    kernel: jax.Array

    def __call__(self, x):
        return x @ self.kernel


class EqxNet(eqx.Module):
    up: EqxLayer
    down: EqxLayer

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class StateNet(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = StateLayer(UP), StateLayer(DOWN)

    def update(self, x):
        return self.down(jnp.tanh(self.up(x)))


class StateLayer(brainstate.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = brainstate.ParamState(jnp.asarray(kernel))

    def update(self, x):
        return x @ self.kernel.value


def of_nnx():
    return NNXNet(), "NNXNet/down"


def of_linen():
    model = LinenNet()
    variables = model.init(jax.random.key(0), X)
    return (lambda x: model.apply(variables, x)), "LinenNet/down"


def of_equinox():
    return EqxNet(EqxLayer(jnp.asarray(UP)), EqxLayer(jnp.asarray(DOWN))), "EqxNet/down"


def of_brainstate():
    return StateNet(), "StateNet/down"


def of_haiku():
    def net(x):
        init = lambda kernel: lambda shape, dtype: jnp.asarray(kernel, dtype)
        up = hk.Linear(4, with_bias=False, w_init=init(UP), name="up")
        down = hk.Linear(4, with_bias=False, w_init=init(DOWN), name="down")
        return down(jnp.tanh(up(x)))

    model = hk.without_apply_rng(hk.transform(net))
    params = model.init(jax.random.key(0), X)
    return (lambda x: model.apply(params, x)), "down"


MODELS = [of_nnx, of_linen, of_equinox, of_brainstate, of_haiku]


@pytest.mark.parametrize("make", MODELS)
def test_inputs_are_values_with_gradients(make):
    model, path = make()
    loss = lambda x: jnp.sum(model(x) ** 2)
    want = jax.grad(lambda zero: jnp.sum(by_hand(X, zero) ** 2))(jnp.zeros_like(X))
    name = f"{path}.input"
    for step in (jax.grad(loss), jax.jit(jax.grad(loss))):
        _, taps = tapax.capture(step, values=name, grads=name)(X)
        assert list(taps.values) == list(taps.grads) == [name]
        close(taps.values[name], jnp.tanh(X @ UP))
        close(taps.grads[name], want, 1e-4)
        site = taps.sites[name]
        assert site.kind == "input" and site.source.startswith(__file__)


@pytest.mark.parametrize("make", MODELS)
def test_inputs_of_modules_are_edited(make):
    model, path = make()
    edited = tapax.edit(model, values={f"{path}.input": lambda h: h**2})
    close(edited(X), by_hand(X, change=lambda h: h**2))
    loss = lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2))(X)
    close(loss(edited), loss(lambda x: by_hand(x, change=lambda h: h**2)), 1e-4)
    step = jax.jit(jax.grad(lambda x: jnp.sum(model(x) ** 2)))
    stopped = tapax.edit(step, grads={f"{path}.input": 0.0})(X)
    np.testing.assert_array_equal(stopped, jnp.zeros_like(X))


@pytest.mark.parametrize("make", MODELS)
def test_inputs_are_sites_only_on_request(make):
    model, _ = make()
    names = tapax.sites(model)(X).names
    assert names and not any(".input" in name for name in names)
    _, taps = tapax.capture(model)(X)
    assert list(taps.values) == names
    marked = lambda values: str(jax.make_jaxpr(tapax.capture(model, values=values))(X))
    assert marked("**/down") == marked("**/down")
    _, taps = tapax.capture(model, values=["**", "**.input"])(X)
    assert [name for name in taps.values if ".input" not in name] == names


def test_globs_and_combinations_select_inputs():
    model = NNXNet()
    pick = lambda values: list(tapax.capture(model, values=values)(X)[1].values)
    assert pick("**.input") == ["NNXNet.input", "NNXNet/up.input", "NNXNet/down.input"]
    assert pick("NNXNet/*.input") == ["NNXNet/up.input", "NNXNet/down.input"]
    assert pick(tapax.glob("**.input") & "**/down") == ["NNXNet/down.input"]
    assert pick(tapax.glob("**.input") & ~tapax.glob("**/down")) == [
        "NNXNet.input",
        "NNXNet/up.input",
    ]
    assert pick({"**.input": tapax.reduce.rms}) == pick("**.input")
    only = tapax.capture(model, values="**.input", modules="**/up")(X)[1]
    assert list(only.values) == ["NNXNet/up.input"]


class Masked(nnx.Module):
    def __call__(self, x, mask=None, *, flag=True):
        del flag
        return x if mask is None else x * mask


class Pair(nnx.Module):
    def __call__(self, state, x):
        return state["h"] + x, state["c"]

    def encode(self, x):
        return 2 * x


class Caller(nnx.Module):
    def __init__(self):
        self.masked, self.pair = Masked(), Pair()

    def __call__(self, x):
        x = self.masked(x, mask=MASK, flag=False)
        x = self.masked(x, MASK)
        x = self.masked(x=x)
        h, c = self.pair({"h": x, "c": x}, x)
        return self.pair.encode(h + c)


def test_structured_arguments_have_their_names():
    _, taps = tapax.capture(Caller(), values="Caller/*.input")(X)
    assert list(taps.values) == [
        "Caller/masked.input:0",
        "Caller/masked.input:mask",
        "Caller/masked.input:0@1",
        "Caller/masked.input:1",
        "Caller/masked.input",
        "Caller/pair.input:0.c",
        "Caller/pair.input:0.h",
        "Caller/pair.input:1",
        "Caller/pair.encode.input",
    ]
    _, taps = tapax.capture(Caller(), values=["**.encode.input", "**.input:mask"])(X)
    assert list(taps.values) == ["Caller/masked.input:mask", "Caller/pair.encode.input"]
    np.testing.assert_array_equal(taps.values["Caller/masked.input:mask"], MASK)
    edited = tapax.edit(Caller(), values={"Caller/masked.input:mask": 0.0})(X)
    np.testing.assert_array_equal(edited, jnp.zeros_like(X))


def test_inputs_that_do_not_exist_are_refused():
    with pytest.raises(tapax.SiteError, match="no site with that name"):
        tapax.capture(NNXNet(), values="NNXNet/nowhere.input")(X)
    with pytest.raises(tapax.SiteError, match="no site with that name"):
        tapax.capture(Caller(), values="Caller/masked.input:key")(X)


def test_inputs_are_captured_under_scan_vmap_and_remat():
    model = NNXNet()
    graph, state = nnx.split(model)

    @jax.checkpoint
    def one(state, x):
        return nnx.merge(graph, state)(x)

    def loss(state, x):
        scanned = lambda c, _: (jax.vmap(one, (None, 0))(state, c), None)
        return jnp.sum(jax.lax.scan(scanned, x, None, length=2)[0] ** 2)

    name = "NNXNet/down.input"
    _, taps = tapax.capture(jax.jit(jax.grad(loss)), values=name, grads=name)(state, X)
    zeros = jnp.zeros((2, 3, 4))

    def plain(zeros):
        first = by_hand(X, zeros[0])
        return jnp.sum(by_hand(first, zeros[1]) ** 2)

    first = by_hand(X)
    close(taps.values[name], jnp.stack([jnp.tanh(X @ UP), jnp.tanh(first @ UP)]))
    close(taps.grads[name], jax.grad(plain)(zeros), 1e-4)


class Difference(nnx.Module):
    def __call__(self, left, **right):
        return left - right["0"]


def test_a_keyword_that_is_a_number_is_not_taken_for_a_position():
    fn = lambda left, right: Difference()(left, **{"0": right})
    out, taps = tapax.capture(fn, values="Difference.input:*")(X, 3 * X)
    close(out, -2 * X)
    assert len(taps.values) == 2
