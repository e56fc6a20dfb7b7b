"""Samplers of blackjax on a marked log density: gradients inside the loops of a trajectory."""

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.oracles import by_hand
from tests.oracles.closeness import assert_close

KEY = jax.random.key(1)
X = np.array([[0.5, -1.0], [1.5, 0.3], [-0.7, 0.8]], np.float32)
Y = np.array([1.0, 0.0, 1.0], np.float32)
START = {"w": jnp.array([0.3, -0.2]), "b": jnp.array(0.1)}
SIZE, INVERSE_MASS = 0.3, np.array([1.0, 0.5, 2.0], np.float32)  # of b, w


def log_density(mark):
    """Compute the log density of logistic regression."""

    def run(position):
        logits = mark(X @ position["w"] + position["b"], "logits")
        fit = jnp.sum(Y * logits - jax.nn.softplus(logits))
        return fit - 0.5 * sum(jnp.sum(p**2) for p in jax.tree.leaves(position))

    return run


SAMPLERS = {
    "hmc": lambda density: blackjax.hmc(density, SIZE, INVERSE_MASS, num_integration_steps=3),
    "nuts": lambda density: blackjax.nuts(density, 3 * SIZE, INVERSE_MASS, max_num_doublings=3),
    "mala": lambda density: blackjax.mala(density, SIZE),
}


def chain(name, mark=by_hand.unmarked, steps=2):
    """Run some steps of a chain; return the last state and the sampler's info for each step."""

    def run(key, position):
        sampler = SAMPLERS[name](log_density(mark))
        step = lambda state, key: sampler.step(key, state)
        return jax.lax.scan(step, sampler.init(position), jax.random.split(key, steps))

    return jax.jit(run)


def reported(name, key=KEY):
    """Record every value of the site in a plain run, in order, with a callback of JAX."""
    seen = []

    def mark(x, name):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), x, ordered=True)
        return x

    jax.block_until_ready(chain(name, mark)(key, START))
    jax.effects_barrier()
    return np.stack(seen)


@pytest.mark.parametrize("name", SAMPLERS)
def test_sites_in_a_trajectory_have_the_values_and_gradients_of_every_step(name):
    doublings = 8 if name == "nuts" else None  # nested loops, each with the first 8 iterations
    out, taps = tapax.capture(chain(name, tapax.sow), steps=doublings)(KEY, START)
    assert_close(out, chain(name)(KEY, START))
    first, rest = taps.values["logits"], taps.values["logits@1"].reshape(-1, 3)
    grads = taps.grads["logits@1"].reshape(-1, 3)
    if name == "nuts":
        ran = taps.valid["logits@1"].reshape(-1)
        rest, grads = rest[ran], grads[ran]
        assert len(rest) == out[1].num_integration_steps.sum()
    expected = reported(name)
    assert_close(np.concatenate([first[None], rest]), expected, 1e-4)
    assert_close(grads, Y - jax.nn.sigmoid(expected[1:]), 1e-4)


@pytest.mark.parametrize("name", ["hmc", "nuts"])
def test_chains_under_vmap_have_the_values_of_each_chain(name):
    """The loops of NUTS run until every chain is done; a mask hides what a chain did not run."""
    keys = jax.random.split(KEY, 3)
    chains = lambda mark: jax.jit(jax.vmap(chain(name, mark), in_axes=(0, None)))
    steps = 8 if name == "nuts" else None
    out, taps = tapax.capture(chains(tapax.sow), steps=steps)(keys, START)
    assert_close(out, chains(by_hand.unmarked)(keys, START), 1e-4)
    axis, counts = taps.values["logits@1"].ndim - 2, set()  # loops, then chains
    for i, key in enumerate(keys):
        values, grads = (
            jnp.take(x["logits@1"], i, axis).reshape(-1, 3) for x in (taps.values, taps.grads)
        )
        if name == "nuts":
            ran = jnp.take(taps.valid["logits@1"], i, axis).reshape(-1)
            values, grads = values[ran], grads[ran]
        expected = reported(name, key)[1:]
        counts.add(len(expected))
        assert_close(values, expected, 1e-4)
        assert_close(grads, Y - jax.nn.sigmoid(expected), 1e-4)
    assert len(counts) == (1 if name == "hmc" else 2)


def test_window_adaptation_is_captured_as_it_runs():
    def warmed(mark):
        adaptation = blackjax.window_adaptation(
            blackjax.nuts, log_density(mark), max_num_doublings=2
        )
        return jax.jit(lambda key: adaptation.run(key, START, 25)[0])

    out, taps = tapax.capture(warmed(tapax.sow), values="logits*", grads="logits*")(KEY)
    assert_close(out, warmed(by_hand.unmarked)(KEY), 1e-3)
    assert taps.values["logits@1"].shape == taps.grads["logits@1"].shape == (25, 3)
    assert_close(taps.grads["logits@1"], Y - jax.nn.sigmoid(taps.values["logits@1"]), 1e-4)


def test_sites_in_a_trajectory_agree_with_leapfrog_steps_by_hand():
    _, taps = tapax.capture(chain("hmc", tapax.sow, steps=1))(KEY, START)
    _, info = chain("hmc", steps=1)(KEY, START)
    slope = lambda q: X.T @ (Y - jax.nn.sigmoid(X @ q["w"] + q["b"])) - q["w"]
    bias = lambda q: jnp.sum(Y - jax.nn.sigmoid(X @ q["w"] + q["b"])) - q["b"]
    force = lambda q: {"w": slope(q), "b": bias(q)}
    mass = {"b": INVERSE_MASS[0], "w": INVERSE_MASS[1:]}
    q, p = START, jax.tree.map(lambda x: x[0], info.momentum)
    for i in range(3):
        p = jax.tree.map(lambda p, f: p + SIZE / 2 * f, p, force(q))
        q = jax.tree.map(lambda q, p, m: q + SIZE * m * p, q, p, mass)
        p = jax.tree.map(lambda p, f: p + SIZE / 2 * f, p, force(q))
        assert_close(taps.values["logits@1"][0, i], X @ q["w"] + q["b"], 1e-4)


def test_derivatives_through_a_trajectory_agree_with_differences():
    """Differentiate the proposal by the logits; each leapfrog step takes a gradient itself."""
    with jax.enable_x64(True):
        start = jax.tree.map(lambda x: x.astype(jnp.float64), START)

        def proposed(mark):
            _, info = chain("hmc", mark, steps=1)(KEY, start)
            return jnp.sum(jnp.sin(info.proposal.position["w"]))

        grads = tapax.grad(lambda: proposed(tapax.sow), at="logits")()
        total = grads["logits"] + grads["logits@1"].sum(axis=(0, 1))
        add = lambda delta: lambda x, name: x + delta
        expected = by_hand.differences(jax.jit(lambda d: proposed(add(d))), np.zeros(3))
        assert_close(total, expected, 1e-7)
        assert np.abs(expected).max() > 1e-3


@pytest.mark.parametrize("name", SAMPLERS)
def test_edit_of_the_density_changes_the_chain(name):
    half = {"logits": lambda x: 0.5 * x}
    edited = tapax.edit(chain(name, tapax.sow), values=half)(KEY, START)
    assert_close(edited, chain(name, by_hand.changed(half))(KEY, START))
    assert not np.allclose(edited[0].position["w"], chain(name)(KEY, START)[0].position["w"])


@pytest.mark.parametrize("name", ["hmc", "nuts"])
def test_search_finds_the_leapfrog_step_that_makes_a_nan(name):
    assert tapax.find_nonfinite(chain(name))(KEY, START) is None
    third = float(reported(name)[3, 0])  # after the value of the start

    def broken(x, name):
        return x * jnp.sqrt(jnp.where(jnp.abs(x[0] - third) < 1e-4, -1.0, 1.0))

    found = tapax.find_nonfinite(chain(name, broken))(KEY, START)
    assert (found.operation, found.kind, found.phase) == ("sqrt", "nan", "forward")
    if name == "hmc":
        assert found.iterations == (0, 2)
    else:  # one leapfrog step, then two, then four, to either side of the start
        taken = int(chain(name)(KEY, START)[1].num_integration_steps[0])
        draw, step = (0, 3) if taken > 2 else (1, 3 - taken)
        doubling = step.bit_length() - 1
        assert found.iterations == (draw, doubling, step - 2**doubling)
