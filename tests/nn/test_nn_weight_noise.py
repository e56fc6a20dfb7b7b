"""Noise on weights in every framework, against the same noise added by hand."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import linen, nnx

import tapax
from tapax import nn
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

KEY = jax.random.key(3)
X = jnp.linspace(-1.0, 2.0, 12).reshape(4, 3)
STD = 0.3


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.out = nnx.Linear(5, 2, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(self.norm(jnp.tanh(self.up(x)))))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = jnp.tanh(linen.Dense(5, name="up")(x))
        x = linen.BatchNorm(use_running_average=True, name="norm")(x)
        x = linen.Dropout(0.5, deterministic=True, name="drop")(x)
        return linen.Dense(2, use_bias=False, name="out")(x)


class EquinoxNet(eqx.Module):
    up: eqx.nn.Linear
    drop: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key):
        self.up = eqx.nn.Linear(3, 5, key=key)
        self.drop = eqx.nn.Dropout(0.5, inference=True)
        self.out = eqx.nn.Linear(5, 2, use_bias=False, key=key)

    def __call__(self, x):
        return self.out(self.drop(jnp.tanh(self.up(x))))


@hk.without_apply_rng
@hk.transform
def haiku_net(x):
    return hk.Linear(2, with_bias=False, name="out")(jnp.tanh(hk.Linear(5, name="up")(x)))


def plain_net(w, x):
    return tapax.sow(jnp.tanh(x @ w["up"]["kernel"] + w["up"]["bias"]), "up") @ w["out"]["kernel"]


def forward(w, x):
    """Run the models above with these weights; batch norms have mean 0 and variance 1."""
    h = jnp.tanh(x @ w["up/kernel"] + w["up/bias"])
    if "norm/scale" in w:
        h = h / np.sqrt(1 + w["epsilon"]) * w["norm/scale"] + w["norm/bias"]
    return h @ w["out/kernel"]


def make_keras():
    layers = keras.layers
    up = layers.Dense(5, activation="tanh", name="up")
    norm, drop = layers.BatchNormalization(name="norm"), layers.Dropout(0.5, name="drop")
    out = layers.Dense(2, use_bias=False, name="out")
    return keras.Sequential([keras.Input((3,)), up, norm, drop, out], name="net")


def cases():
    """Return functions, their arguments before the data, and their weights by name."""
    net = NNXNet(nnx.Rngs(0))
    names = {
        "norm/bias": "norm/bias", "norm/scale": "norm/scale", "out/kernel": "out/kernel",
        "up/bias": "up/bias", "up/kernel": "up/kernel",
    }  # fmt: skip
    arrays = {n: nnx.state(net)[n.split("/")[0]][n.split("/")[1]][...] for n in names}
    yield "nnx", (net, (), names, arrays, 1e-5)
    yield "nnx argument", (lambda model, x: model(x), (net,), names, arrays, 1e-5)
    yield "nnx jitted", (nnx.jit(lambda model, x: model(x)), (net,), names, arrays, 1e-5)
    variables = LinenNet().init(KEY, X)
    arrays = {n: variables["params"][n.split("/")[0]][n.split("/")[1]] for n in names}
    linen_names = {f"params/{n}": n for n in names}
    yield "linen", (LinenNet().apply, (variables,), linen_names, arrays, 1e-5)
    tree = EquinoxNet(KEY)
    names = {"up/weight": "up/kernel", "up/bias": "up/bias", "out/weight": "out/kernel"}
    arrays = {"out/kernel": tree.out.weight, "up/bias": tree.up.bias, "up/kernel": tree.up.weight}
    run = lambda model, x: jax.vmap(model)(x)
    yield "equinox", (run, (tree,), names, arrays, None)
    yield "equinox jitted", (eqx.filter_jit(run), (tree,), names, arrays, None)
    params = haiku_net.init(KEY, X)
    names = {"out/w": "out/kernel", "up/b": "up/bias", "up/w": "up/kernel"}
    out, up = params["out"], params["up"]
    arrays = {"out/kernel": out["w"], "up/bias": up["b"], "up/kernel": up["w"]}
    yield "haiku", (haiku_net.apply, (params,), names, arrays, None)
    model = make_keras()
    values = {v.path: v.value for v in model.trainable_variables}
    names = {"net/norm/beta": "norm/bias", "net/norm/gamma": "norm/scale"}
    names = {p: names.get(p, p.removeprefix("net/")) for p in values}
    arrays = {names[p]: x for p, x in values.items()}
    yield "keras", (model, (), names, arrays, 1e-3)
    plain = {"up": {"kernel": jnp.sin(jnp.arange(15.0)).reshape(3, 5), "bias": jnp.ones(5)}}
    plain["out"] = {"kernel": jnp.cos(jnp.arange(10.0)).reshape(5, 2)}
    names = {n: n for n in ("out/kernel", "up/bias", "up/kernel")}
    arrays = {n: plain[n.split("/")[0]][n.split("/")[1]] for n in names}
    yield "plain", (plain_net, (plain,), names, arrays, None)


CASES = ("nnx", "nnx argument", "nnx jitted", "linen", "equinox", "equinox jitted", "haiku",
         "keras", "plain")  # fmt: skip


def perturb(key, names, arrays, std):
    """Add noise to the weights; the n-th path draws with the n-th key."""
    noisy = {}
    for n, path in enumerate(names):
        x = arrays[names[path]]
        own = jax.random.fold_in(key, n)
        noisy[names[path]] = x + std(x) * jax.random.normal(own, x.shape, x.dtype)
    return noisy


def run_by_hand(case, w, epsilon):
    if case.startswith("equinox"):  # whose weights are transposed
        w = {name: x.T for name, x in w.items()}
    return forward(w | {"epsilon": epsilon}, X)


@pytest.mark.many
@pytest.mark.parametrize("case", CASES)
def test_weight_noise_equals_draws_by_hand(case):
    fn, before, names, arrays, epsilon = dict(cases())[case]
    noisy = nn.weight_noise(fn, STD)
    for _ in range(2):  # also from the cache
        got = noisy.sample(KEY, 2, *before, X)
        for key, out in zip(jax.random.split(KEY, 2), got, strict=True):
            w = perturb(key, names, arrays, lambda x: STD)
            assert_close(out, run_by_hand(case, w, epsilon))
    plain = run_by_hand(case, arrays, epsilon)
    assert_close(fn(*before, X), plain)  # the model is unchanged
    p = nn.predict(noisy, *before, X, num_members=3, key=KEY, plain_first=True)
    assert_close(p.members[0], plain)
    assert_close(p.members[1:], noisy.sample(KEY, 3, *before, X)[1:])


@pytest.mark.parametrize("case", ["nnx", "linen", "equinox", "keras"])
def test_relative_weight_noise_is_in_units_of_each_weight(case):
    fn, before, names, arrays, epsilon = dict(cases())[case]
    rms = lambda x: STD * np.sqrt(np.mean(np.square(np.asarray(x, np.float64))))
    got = nn.weight_noise(fn, STD, relative=True)(KEY, *before, X)
    assert_close(got, run_by_hand(case, perturb(KEY, names, arrays, rms), epsilon))


DROPS = {
    "nnx": "NNXNet/drop",
    "linen": "LinenNet/drop",
    "equinox": "EquinoxNet/drop",
    "keras": "net/drop",
    "haiku": "out",
    "plain": "up",
}


@pytest.mark.parametrize("case", DROPS)
def test_dropout_layers_in_evaluation_mode_are_sites(case):
    """A selected dropout layer drops, while the batch norm of the model does not train."""
    fn, before, _, w, epsilon = dict(cases())[case]
    got = nn.dropout(fn, at=DROPS[case], rate=0.5)(KEY, *before, X)
    own = jax.random.fold_in(KEY, 0)

    mask = jax.random.bernoulli(own, 0.5, (4, 2 if case == "haiku" else 5))
    if case == "equinox":  # whose weights are transposed, and which maps over the rows
        w = {name: x.T for name, x in w.items()}
        draw = lambda key: jax.random.bernoulli(key, 0.5, (5,))
        mask = jax.vmap(draw)(jax.random.split(own, len(X)))
    h = jnp.tanh(X @ w["up/kernel"] + w["up/bias"])
    if "norm/scale" in w:
        h = h / np.sqrt(1 + epsilon) * w["norm/scale"] + w["norm/bias"]
    after = case == "haiku"  # whose functions for dropout are neither modules nor sites
    want = 2 * mask * (h @ w["out/kernel"]) if after else (2 * mask * h) @ w["out/kernel"]
    assert_close(got, want)


def test_selected_weights_alone_are_perturbed():
    fn, before, _, arrays, epsilon = dict(cases())["linen"]
    got = nn.weight_noise(fn, STD, at="**/up/*")(KEY, *before, X)
    names = {"params/up/bias": "up/bias", "params/up/kernel": "up/kernel"}
    w = arrays | perturb(KEY, names, arrays, lambda x: STD)
    assert_close(got, run_by_hand("linen", w, epsilon))


def test_state_of_a_model_in_training_stays_as_it_is():
    model = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    read = lambda: jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    before = read()
    nn.weight_noise(model, STD).sample(KEY, 2, X)
    jax.tree.map(np.testing.assert_array_equal, before, read())


def test_one_array_in_two_places_is_two_weights():
    """Two places may share zeros by chance; only a variable shared by layers is one weight."""
    w = jnp.sin(jnp.arange(9.0)).reshape(3, 3)
    got = nn.weight_noise(lambda w, x: x @ w["a"] @ w["b"], STD)(KEY, {"a": w, "b": w}, X)
    a, b = (w + STD * jax.random.normal(jax.random.fold_in(KEY, n), (3, 3)) for n in range(2))
    assert_close(got, X @ a @ b)
    layer = nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0))
    got = nn.weight_noise(nnx.Sequential(layer, layer), STD)(KEY, X)
    draw = jax.random.normal(jax.random.fold_in(KEY, 0), (3, 3))
    assert_close(got, X @ (layer.kernel[...] + STD * draw) @ (layer.kernel[...] + STD * draw))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_perturbed_weights_keep_shape_and_dtype(dtype):
    params = {"w": jnp.ones((64, 64), dtype), "count": jnp.arange(3), "on": jnp.array([True])}
    got = nn.weight_noise(lambda p: p, 0.5)(KEY, params)
    assert got["w"].dtype == dtype and got["w"].shape == (64, 64)
    assert abs(np.asarray(got["w"] - 1, np.complex64).std() - 0.5) < 0.02
    np.testing.assert_array_equal(got["count"], params["count"])
    np.testing.assert_array_equal(got["on"], params["on"])


def test_variance_of_a_linear_model_is_that_of_the_closed_form():
    """Noise on w in x @ w has the variance std**2 * x @ x."""
    x, w = jnp.linspace(-1.0, 2.0, 5), jnp.linspace(0.5, 1.0, 5)
    out = nn.weight_noise(lambda w, x: x @ w, 0.2, params=0).sample(KEY, 20_000, w, x)
    variance = 0.2**2 * float(x @ x)
    out = np.asarray(out, np.float64)
    assert abs(out.mean() - float(x @ w)) < 5 * np.sqrt(variance / 20_000)
    assert abs(out.var() / variance - 1) < 0.05


def test_gradients_are_those_of_the_perturbed_weights():
    w = {"kernel": jnp.sin(jnp.arange(6.0)).reshape(3, 2)}
    noisy = nn.weight_noise(lambda w, x: jnp.sum(jnp.tanh(x @ w["kernel"])), STD)
    got = jax.jit(jax.grad(noisy, 1))(KEY, w, X)["kernel"]
    drawn = STD * jax.random.normal(jax.random.fold_in(KEY, 0), (3, 2))
    assert_close(got, jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w)))(w["kernel"] + drawn))


def test_weights_and_sites_are_perturbed_together():
    fn, before, names, arrays, _ = dict(cases())["plain"]
    both = nn.dropout(nn.weight_noise(fn, STD), at="up", rate=0.5)
    w = perturb(KEY, names, arrays, lambda x: STD)
    h = jnp.tanh(X @ w["up/kernel"] + w["up/bias"])
    kept = jax.random.bernoulli(jax.random.fold_in(KEY, 3), 0.5, h.shape)
    assert_close(both(KEY, *before, X), jnp.where(kept, 2 * h, 0.0) @ w["out/kernel"])


WEIGHTS = {"w": jnp.ones((3, 2))}
bound = LinenNet().bind(LinenNet().init(KEY, X))
read_data = lambda x: x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.weight_noise(read_data, 0.1)(KEY, X), TypeError,
         "The first argument of the function <lambda> is an array, which may be data. Pass the "
         "model as an argument, and say which one it is: tapax.nn.weight_noise(fn, ..., "
         "params=0)."),
        (lambda: nn.weight_noise(lambda p, x: x, 0.1)(KEY, {"n": jnp.arange(3)}, X), ValueError,
         "The dict that "),
        (lambda: nn.weight_noise(lambda p, x: x, 0.1, at="**/b")(KEY, WEIGHTS, X), tapax.SiteError,
         "`at` is '**/b', which matches no weight. The weights are 'w'."),
        (lambda: nn.weight_noise(lambda p: p, 0.1, params=1)(KEY, WEIGHTS), TypeError,
         "`params` says that argument 1 of "),
        (lambda: nn.weight_noise(lambda p: p, -0.1), ValueError,
         "`std` is a standard deviation and cannot be negative, but is -0.1."),
        (lambda: nn.weight_noise(bound, 0.1)(KEY, X), TypeError,
         "The first argument of the function LinenNet is an array, which may be data."),
    ],
)  # fmt: skip
def test_bad_input_of_weight_noise(call, error, message):
    with pytest.raises(error) as found:
        call()
    assert str(found.value).startswith(message)
