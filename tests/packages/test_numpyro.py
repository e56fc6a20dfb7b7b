"""Probabilistic programs of NumPyro: networks, variational steps and Hamiltonian steps."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import nnx
from numpyro.contrib import module as modules
from numpyro.infer import HMC, MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import potential_energy

import tapax
from tests.oracles import by_hand
from tests.oracles.closeness import assert_close

KEY = jax.random.key(0)
X = np.linspace(-1, 2, 6, dtype=np.float32)[:, None]
Y = np.sin(3 * X[:, 0])


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="out")(nn.tanh(nn.Dense(4, name="hidden")(x)))[..., 0]


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden, self.out = nnx.Linear(1, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))[..., 0]


class EquinoxNet(eqx.Module):
    hidden: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(KEY)
        self.hidden = eqx.nn.Linear(1, 4, key=keys[0])
        self.out = eqx.nn.Linear(4, 1, key=keys[1])

    def __call__(self, x):
        return jax.vmap(lambda x: self.out(jnp.tanh(self.hidden(x)))[0])(x)


PRIOR = dist.Normal(0, 1)
NETS = {
    "Net": lambda: modules.random_flax_module("net", Net(), PRIOR, input_shape=(1,)),
    "NnxNet": lambda: modules.random_nnx_module("net", NnxNet(), PRIOR),
    "EquinoxNet": lambda: modules.random_eqx_module("net", EquinoxNet(), PRIOR),
}


def bayesian(mark=by_hand.unmarked, kind="Net"):
    """Model a network with random weights, as NumPyro documents for `random_flax_module`."""

    def model(x, y=None):
        net = NETS[kind]()
        sigma = mark(numpyro.sample("sigma", dist.LogNormal(0.0, 1.0)), "sigma")
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(mark(net(x), "mean"), sigma), obs=y)

    return model


def data(tree):
    """Convert random keys to numbers."""
    is_key = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def drawn(kind):
    """Draw the weights and the unconstrained noise of a model."""
    trace = numpyro.handlers.trace(numpyro.handlers.seed(bayesian(kind=kind), KEY)).get_trace(X, Y)
    sites = {k: v["value"] for k, v in trace.items() if v["type"] == "sample"}
    return {
        k: jnp.log(v) if k == "sigma" else v for k, v in sites.items() if k not in ("y", "data")
    }


def energy(mark=by_hand.unmarked, kind="Net"):
    return lambda draw: potential_energy(bayesian(mark, kind), (X, Y), {}, draw)


def by_formula(draw, kind):
    """Compute the network, and the gradients of the potential energy by its layers, in NumPy."""
    weights = {name.rpartition("/")[2]: np.asarray(w) for name, w in draw.items()}
    if kind == "EquinoxNet":
        hidden, out = weights["hidden.weight"].T, weights["out.weight"].T
    else:
        hidden, out = weights["hidden.kernel"], weights["out.kernel"]
    h = X @ hidden + weights["hidden.bias"]
    mean = (np.tanh(h) @ out + weights["out.bias"])[:, 0]
    grad = (mean - Y) / np.exp(2 * draw["sigma"])
    return (h, mean), (grad[:, None] * out[:, 0] * (1 - np.tanh(h) ** 2), grad)


@pytest.mark.parametrize("kind", NETS)
def test_potential_energy_has_the_values_and_gradients_of_the_formula(kind):
    draw = drawn(kind)
    step = jax.jit(jax.value_and_grad(energy(kind=kind)))
    out, taps = tapax.capture(step)(draw)
    assert_close(out, step(draw))
    call = "@1" if kind == "Net" else ""  # the first is its initialization
    values, grads = by_formula(draw, kind)
    for name, value, grad in zip((f"{kind}/hidden", kind), values, grads, strict=True):
        assert_close(taps.values[name + call], value)
        assert_close(taps.grads[name + call], grad, 1e-4)


def test_gradients_of_the_potential_agree_with_differences():
    with jax.enable_x64(True):
        draw = jax.tree.map(lambda x: x.astype(jnp.float64), drawn("Net"))
        grads = tapax.grad(energy(tapax.sow), at=["mean", "sigma"])(draw)
        for site, shape in {"mean": (6,), "sigma": ()}.items():
            add = lambda delta, site=site: lambda x, name: x + delta if name == site else x
            fn = jax.jit(lambda delta, add=add: energy(add(delta))(draw))
            assert_close(grads[site], by_hand.differences(fn, np.zeros(shape)), 1e-6)


def variational(mark=by_hand.unmarked):
    """Make the network with parameters, trained by a guide without latent variables."""

    def model(x, y):
        net = modules.flax_module("net", Net(), input_shape=(1,))
        sigma = numpyro.param("sigma", 0.5, constraint=dist.constraints.positive)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(mark(net(x), "mean"), sigma), obs=y)

    return SVI(model, lambda x, y: None, numpyro.optim.Adam(0.01), Trace_ELBO())


def started(svi):
    """Return a training step and its initial state."""
    state = svi.init(KEY, X, Y)
    return jax.jit(lambda state: svi.update(state, X, Y)), state


def network(params):
    """Compute the hidden layer and the result in NumPy."""
    hidden, out = params["net$params"]["hidden"], params["net$params"]["out"]
    h = X @ hidden["kernel"] + hidden["bias"]
    return h, (np.tanh(h) @ out["kernel"] + out["bias"])[:, 0]


def test_variational_step_has_the_gradients_of_the_likelihood():
    svi = variational(tapax.sow)
    step, state = started(svi)
    h, mean = network(svi.get_params(state))
    out, taps = tapax.capture(step)(state)
    plain, start = started(variational())
    assert_close(data(out), data(plain(start)))
    assert_close(taps.values["Net/hidden"], h)
    assert_close(taps.values["mean"], mean)
    assert_close(taps.grads["mean"], (mean - Y) / 0.5**2, 1e-4)


def test_variational_step_with_particles_maps_over_them():
    elbo = Trace_ELBO(num_particles=3)
    make = lambda mark: SVI(bayesian(mark), AutoNormal(bayesian()), numpyro.optim.SGD(0.01), elbo)
    step, state = started(make(tapax.sow))
    out, taps = tapax.capture(step)(state)
    plain, start = started(make(by_hand.unmarked))
    assert_close(data(out), data(plain(start)))
    mean, sigma = taps.values["mean"], taps.values["sigma"]
    assert mean.shape == (3, 6) and sigma.shape == (3,)
    assert_close(taps.grads["mean"], (mean - Y) / sigma[:, None] ** 2 / 3, 1e-4)


def test_training_by_numpyro_itself_is_seen_step_by_step():
    run = lambda mark: lambda key: variational(mark).run(key, 4, X, Y, progress_bar=False)
    out, taps = tapax.capture(run(tapax.sow))(KEY)
    assert_close(out.losses, run(by_hand.unmarked)(KEY).losses, 1e-4)
    svi = variational()
    step, state = started(svi)
    for i in range(4):
        params = svi.get_params(state)
        h, mean = network(params)
        assert_close(taps.values["Net/hidden@2"][i], h, 1e-4)
        assert_close(taps.grads["mean@1"][i], (mean - Y) / params["sigma"] ** 2, 1e-3)
        state, _ = step(state)


def test_edit_in_a_variational_step_changes_the_parameters():
    half = {"mean": lambda x: 0.5 * x}
    step, state = started(variational(tapax.sow))
    by, start = started(variational(by_hand.changed(half)))
    assert_close(data(tapax.edit(step, values=half)(state)), data(by(start)))


def test_search_finds_the_nan_of_a_variational_step():
    step, state = started(variational())
    assert tapax.find_nonfinite(step)(state) is None
    signs = np.ones(6, np.float32)
    step, state = started(variational(lambda x, name: x * jnp.sqrt(signs)))
    signs[3] = -1.0  # NumPyro refuses a NaN when it starts
    found = tapax.find_nonfinite(step)(state)
    assert (found.operation, found.kind, found.index) == ("sqrt", "nan", (3,))
    assert found.source.startswith(__file__)


def chain(mark=by_hand.unmarked, steps=2):
    kernel = HMC(bayesian(mark), step_size=0.01, num_steps=3, adapt_step_size=False)

    def run(state):
        sample = lambda state, _: (kernel.sample(state, (X, Y), {}), state.z)
        return jax.lax.scan(sample, state, length=steps)[0]

    return kernel, run


def reported():
    """Record every value of the site in a plain chain, in order, with a callback of JAX."""
    seen = []

    def mark(x, name):
        if name == "mean":
            jax.debug.callback(lambda x: seen.append(np.asarray(x)), x, ordered=True)
        return x

    kernel, run = chain(mark)
    state = kernel.init(KEY, 0, None, (X, Y), {})
    jax.effects_barrier()
    seen.clear()
    jax.block_until_ready(jax.jit(run)(state))
    jax.effects_barrier()
    return np.stack(seen)


def test_sites_in_a_trajectory_have_the_values_and_gradients_of_every_step():
    kernel, run = chain(tapax.sow)
    out, taps = tapax.capture(jax.jit(run))(kernel.init(KEY, 0, None, (X, Y), {}))
    kernel, plain = chain()
    assert_close(data(out), data(jax.jit(plain)(kernel.init(KEY, 0, None, (X, Y), {}))))
    mean, sigma = taps.values["mean"], taps.values["sigma"]
    assert mean.shape == (2, 3, 6)
    assert_close(mean.reshape(-1, 6), reported(), 1e-4)
    assert_close(taps.grads["mean"], (mean - Y) / sigma[..., None] ** 2, 1e-4)


def test_edit_in_a_trajectory_changes_the_chain():
    kernel, run = chain(tapax.sow)
    state = kernel.init(KEY, 0, None, (X, Y), {})
    half = {"mean": lambda x: 0.5 * x}
    edited = tapax.edit(jax.jit(run), values=half)(state)
    other, by = chain(by_hand.changed(half))
    other.init(KEY, 0, None, (X, Y), {})
    assert_close(data(edited), data(jax.jit(by)(state)), 1e-4)


def test_predictions_of_drawn_networks_are_stacked():
    draws = [drawn("Net"), jax.tree.map(lambda x: 2 * x, drawn("Net"))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *draws)
    stacked["sigma"] = jnp.exp(stacked["sigma"])
    predict = lambda mark: lambda key: Predictive(bayesian(mark), stacked)(key, X)["y"]
    out, taps = tapax.capture(predict(tapax.sow))(KEY)
    assert_close(out, predict(by_hand.unmarked)(KEY))
    for i, draw in enumerate(draws):
        (hidden, mean), _ = by_formula(draw, "Net")
        assert_close(taps.values["Net/hidden@1"][i], hidden)
        assert_close(taps.values["mean"][i], mean)


def test_a_whole_run_of_nuts_is_captured():
    def run(mark):
        def sample(key):
            mcmc = MCMC(
                NUTS(bayesian(mark), max_tree_depth=3),
                num_warmup=5,
                num_samples=4,
                progress_bar=False,
            )
            mcmc.run(key, X, Y)
            return mcmc.get_samples()

        return sample

    out, taps = tapax.capture(run(tapax.sow))(KEY)
    assert_close(out, run(by_hand.unmarked)(KEY), 1e-3)
    mean, sigma = taps.values["mean@2"], taps.values["sigma@2"]  # of the last leapfrog step
    assert mean.shape == (9, 6)
    assert_close(taps.grads["mean@2"], (mean - Y) / sigma[:, None] ** 2, 1e-3)
