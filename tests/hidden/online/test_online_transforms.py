"""Online rules under transformations, and the sizes and types of their memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tapax
from tapax.hidden import online
from tests.hidden.online.test_online import (
    UNITS,
    B,
    H,
    I,
    O,
    bptt,
    close,
    cosine,
    data,
    leaky,
    learn,
    loss,
    made,
    state_of,
    wide,  # noqa: F401
)
from tests.hidden.online.test_online_estimates import DENSE, GRU, gru
from tests.models.foreign_primitives import foreign_primitive
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

RULES = {
    "rtrl": online.rtrl,
    "d_rtrl": online.d_rtrl,
    "old": functools.partial(online.d_rtrl, signal="old"),
    "pp_prop": functools.partial(online.pp_prop, decay=0.7),
    "e_prop": functools.partial(online.e_prop, decay=0.5),
    "random": lambda *a: online.e_prop(*a, feedback="random", key=jax.random.key(0)),
}


@pytest.mark.parametrize("rule", RULES)
def test_products_by_primitives_of_other_libraries_are_products(rule):
    times = foreign_primitive("their_product", lambda x, w: x @ w)

    def step(params, h, x, times=times.bind):
        h = 0.5 * h + jnp.tanh(times(x, params["w"]) + times(h, params["v"]))
        return h, times(h, params["o"])

    plain = functools.partial(step, times=jnp.matmul)
    params = made(w=(I, H), v=(H, H), o=(H, O))
    state, (xs, ys) = state_of(1, B), data(B)
    found = [learn(RULES[rule](fn, loss), params, state, xs, ys) for fn in (step, plain)]
    close(*found)


@pytest.mark.many
@pytest.mark.parametrize("rule", RULES)
def test_rules_agree_under_every_transformation(rule):
    """Eager, compiled, scanned and mapped rules agree; the first two run twice."""
    learner = RULES[rule](gru, loss)
    state, (xs, ys) = state_of(1, B), data(B)
    xs, ys = xs[:2], ys[:2]
    memory = learner.init(GRU, state, jax.ShapeDtypeStruct(xs[0].shape, xs.dtype))
    sizes = jax.tree.map(jnp.shape, memory)
    want = []
    for x, y in zip(xs, ys, strict=True):
        learned, memory = learner.update(memory, GRU, x, target=y)
        want.append(learned)
        assert jax.tree.map(jnp.shape, memory) == sizes
    want = jax.tree.map(lambda *a: jnp.stack(a), *want)

    def scanned(params, state, xs, ys):
        def one(memory, xy):
            return learner.update(memory, params, xy[0], target=xy[1])[::-1]

        return jax.lax.scan(one, learner.init(params, state, xs[0]), (xs, ys))

    for run in (scanned, jax.jit(scanned)):
        last, found = run(GRU, state, xs, ys)
        close(found, want)
        close(last, memory)
    each = jax.vmap(scanned, (None, 0, 1, 1))(GRU, state, xs, ys)[1]
    close(jax.tree.map(lambda g: g.sum(0), each.grads), want.grads)
    assert_close(each.out, jnp.moveaxis(want.out, 1, 0))


@pytest.mark.parametrize("rule", RULES)
def test_memory_does_not_know_how_long_a_sequence_is(rule):
    learner = RULES[rule](gru, loss)

    def run(xs, ys):
        memory = learner.init(GRU, jnp.zeros((B, H)), xs[0])
        step = lambda m, xy: (learner.update(m, GRU, xy[0], target=xy[1])[1], None)
        return jax.lax.scan(step, memory, (xs, ys))[0]

    def temporary(length):
        args = jnp.zeros((length, B, I)), jnp.zeros((length, B, O))
        return jax.jit(run).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary(4000) <= temporary(40) + 16_384


def test_memories_have_the_documented_sizes():
    sizes = {
        rule: sum(
            x.size
            for x in jax.tree.leaves(
                RULES[rule](gru, loss).init(GRU, jnp.zeros(H), jnp.zeros(I)).traces
            )
        )
        for rule in RULES
    }
    weights = sum(GRU[k].size for k in ("i", "h", "b", "in", "hn", "bn"))
    assert sizes["d_rtrl"] == sizes["random"] == weights
    assert sizes["e_prop"] == 2 * weights
    assert sizes["rtrl"] == H * sum(x.size for x in GRU.values())
    # x for each matrix, f for its result, and the biases
    assert sizes["pp_prop"] == 2 * (I + H) + 2 * (2 * H + H) + 2 * H + H


def test_states_without_memory_have_no_traces():
    """The state of a plain RNN acts on the next state only through a matrix."""
    step, params, _ = DENSE["vanilla"]
    memory = online.d_rtrl(step, loss).init(params, jnp.zeros(H), jnp.zeros(I))
    assert jax.tree.leaves(memory.traces) == []


@pytest.mark.many
def test_narrow_types_stay_narrow():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), GRU)
    state, (xs, ys) = state_of(1, B).astype(jnp.bfloat16), data(B)
    xs = xs.astype(jnp.bfloat16)
    exact = bptt(gru, params, state, xs, ys)[1]
    for rule in RULES.values():
        learner = rule(gru, loss)
        memory = learner.init(params, state, xs[0])
        learned, memory = jax.jit(learner.update)(memory, params, xs[0], target=ys[0])
        assert {x.dtype for x in jax.tree.leaves(learned.grads)} == {jnp.dtype("bfloat16")}
        assert {x.dtype for x in jax.tree.leaves(memory.traces)} == {jnp.dtype("float32")}
        assert memory.state.dtype == jnp.bfloat16
    assert cosine(learn(online.d_rtrl(gru, loss), params, state, xs, ys)[1], exact) > 0.9


def test_side_effects_of_a_step_happen_once():
    """Prints and marks happen once, with random keys among the inputs."""
    calls = []

    def step(p, h, x, key):
        keep = jax.random.bernoulli(key, 0.5, h.shape)
        h = tapax.sow(p["a"] * h + keep * (x @ p["w"]), "h")
        jax.debug.callback(lambda h: calls.append(h), h)
        return h, h @ p["o"]

    params, (xs, ys) = UNITS["wrapped"][1], data(B)
    learner, key = online.d_rtrl(step, loss), jax.random.key(0)
    memory = learner.init(params, state_of(1, B), xs[0], key)

    def update(memory, x, y):
        return learner.update(memory, params, x, key, target=y)[1]

    memory, taps = tapax.capture(update, grads=None)(memory, xs[0], ys[0])
    jax.effects_barrier()
    (call,) = calls
    assert list(taps.values) == ["h"]
    np.testing.assert_allclose(call, memory.state)
    np.testing.assert_allclose(taps.values["h"], memory.state)


def test_a_new_sequence_and_a_state_put_in():
    learner = online.d_rtrl(leaky, loss)
    params, (xs, ys) = UNITS["leaky"][1], data(B)
    memory = learner.init(params, state_of(1, B), xs[0])
    _, memory = learner.update(memory, params, xs[0], target=ys[0])
    other = dataclasses.replace(memory, state=jnp.ones((B, H)))
    learned, _ = learner.update(other, params, xs[1], target=ys[1])
    np.testing.assert_allclose(learned.out, leaky(params, jnp.ones((B, H)), xs[1])[1])
    fresh = learner.init(params, state_of(1, B), xs[0])
    assert not any(np.any(x) for x in jax.tree.leaves(fresh.traces))


def test_with_optax_parameters_may_change_at_every_step():
    """A leaky unit has to remember a bit, and learns at every step."""
    learner, opt = online.d_rtrl(leaky, loss), optax.adam(3e-2)
    params = UNITS["leaky"][1]

    def sequence(carry, key):
        params, opt_state = carry
        bit = jnp.where(jax.random.bernoulli(key, shape=(16, 1)), 1.0, -1.0)
        xs = jnp.zeros((5, 16, I)).at[0].set(bit)
        memory = learner.init(params, jnp.zeros((16, H)), xs[0])

        def one(carry, x):
            memory, params, opt_state = carry
            learned, memory = learner.update(memory, params, x, target=bit)
            updates, opt_state = opt.update(learned.grads, opt_state, params)
            return (memory, optax.apply_updates(params, updates), opt_state), learned.loss

        (_, params, opt_state), losses = jax.lax.scan(one, (memory, params, opt_state), xs)
        return (params, opt_state), losses[-1] / 16

    keys = jax.random.split(jax.random.key(0), 250)
    _, losses = jax.lax.scan(sequence, (params, opt.init(params)), keys)
    assert losses[:5].mean() > 1 and losses[-5:].mean() < 0.1


@pytest.mark.parametrize("rule", RULES)
def test_python_numbers_become_arrays(rule):
    """Python numbers as parameters, states and inputs become arrays, also in a scan."""
    step = lambda p, h, x: ((h := p["a"] * h + p["w"] * x), h)
    learner, params = RULES[rule](step, loss), {"a": 0.5, "w": 2.0}

    def run(xs):
        one = lambda m, x: learner.update(m, params, x, target=1.0)[::-1]
        return jax.lax.scan(one, learner.init(params, 0.0, 0.0), xs)[1]

    learned = run(jnp.ones(3))
    np.testing.assert_allclose(learned.out, [2, 3, 3.5])
    if rule in ("rtrl", "d_rtrl", "old"):
        np.testing.assert_allclose(learned.grads["w"], 2 * np.array([1 * 1, 2 * 1.5, 2.5 * 1.75]))
        np.testing.assert_allclose(learned.grads["a"], 2 * np.array([0, 2 * 2, 2.5 * 4]))


def test_closed_over_values_and_steps_made_in_a_trace():
    """A learner made inside a traced function may close over traced values."""
    params, (xs, ys) = UNITS["leaky"][1], data(B)

    @jax.jit
    def run(scale):
        step = lambda p, h, x: leaky(p, h, scale * x)
        return learn_once(online.d_rtrl(step, loss), params, xs, ys)

    def learn_once(learner, params, xs, ys):
        return learn(learner, params, state_of(1, B), xs, ys)

    for scale in (1.0, 2.0):
        want = bptt(leaky, params, state_of(1, B), scale * xs, ys)
        close(run(scale), want)
