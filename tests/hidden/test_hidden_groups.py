"""Groups of hidden states, and their Jacobians against the Jacobian of the whole step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapax.hidden import HiddenError, hidden_groups
from tests.models.foreign_primitives import foreign_primitive

N = 3
rng = np.random.default_rng(0)
W, U, V = rng.normal(size=(3, N, N)) * 0.5
X = rng.normal(size=N)


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def lstm(state, x):
    gates = jax.nn.sigmoid(W @ state["h"] + U @ x)
    c = gates * state["c"] + jnp.tanh(V @ x)
    return {"c": c, "h": gates * jnp.tanh(c)}, c


def leaky(state, x):
    return {"v": 0.9 * state["v"] - state["a"] + x, "a": 0.5 * state["a"] + 0.1 * state["v"]}, x


def stacked(state, x):
    one = 0.5 * state["one"] + jnp.tanh(W @ x)
    return {"one": one, "two": 0.5 * state["two"] + jnp.tanh(U @ one)}, one


def wide(state, x):
    """Connect two states of different shapes."""
    narrow = 0.5 * state["narrow"] + jnp.sum(state["wide"]) + x
    return {"narrow": narrow, "wide": 0.5 * state["wide"] + jnp.tile(narrow, 2)}, x


def dense(state, x):
    return {"a": jnp.tanh(W @ state["b"] + x), "b": jnp.tanh(U @ state["a"])}, x


def norm(state, x):
    h = state["h"] - jnp.mean(state["h"])
    return {"h": h / jnp.sqrt(jnp.mean(h**2) + 1) + x, "k": state["k"] * jnp.max(h)}, x


def spiking(state, x):
    @jax.custom_vjp
    def spike(v):
        return (v > 0) * 1.0

    spike.defvjp(lambda v: (spike(v), v), lambda v, ct: (ct / (1 + jnp.abs(v)) ** 2,))
    z = spike(state["v"] - 0.1)
    return {"v": 0.9 * state["v"] * (1 - z) + x}, z


def looping(state, x):
    def body(carry):
        i, h = carry
        return i + 1, 0.9 * h + 0.1 * jnp.sin(h)

    h = lax.while_loop(lambda c: c[0] < 3, body, (0, state["h"]))[1]
    k = lax.scan(lambda k, _: (jnp.sin(k) + h, None), state["k"], None, length=4)[0]
    return {"h": h, "k": lax.cond(k[0] > 0, jnp.sin, jnp.cos, k)}, x


def mixing_in_a_loop(state, x):
    one = 0.5 * state["one"] + x
    driven, _ = lax.scan(lambda c, _: (W @ c, None), one, None, length=4)
    return {"one": one, "two": 0.5 * state["two"] + jnp.tanh(driven)}, one


their_product = foreign_primitive("their_product", lambda x, w: x @ w)
their_leak = foreign_primitive("their_leak", lambda x, by: by * x)


def their_layers(state, x):
    one = their_leak.bind(state["one"], by=0.5) + jnp.tanh(W @ x)
    return {"one": one, "two": 0.5 * state["two"] + jnp.tanh(their_product.bind(one, U))}, one


def their_dynamics(state, x):
    v = 0.9 * state["v"] - their_leak.bind(state["a"], by=0.5) + x
    return {"v": v, "a": 0.5 * state["a"] + 0.1 * v}, x


STATES = {
    lstm: {"c", "h"}, leaky: {"v", "a"}, stacked: {"one", "two"}, dense: {"a", "b"},
    norm: {"h", "k"}, spiking: {"v"}, looping: {"h", "k"}, mixing_in_a_loop: {"one", "two"},
    their_layers: {"one", "two"}, their_dynamics: {"a", "v"},
}  # fmt: skip
GROUPS = {
    lstm: [("c", "h")], leaky: [("a", "v")], stacked: [("one",), ("two",)],
    dense: [("a",), ("b",)], norm: [("h", "k")], spiking: [("v",)], looping: [("h", "k")],
    mixing_in_a_loop: [("one",), ("two",)], their_layers: [("one",), ("two",)],
    their_dynamics: [("a", "v")],
}  # fmt: skip
DIAGONAL = {leaky, stacked, dense, spiking, mixing_in_a_loop, their_layers, their_dynamics}


def state_of(step):
    return {k: rng.normal(size=N) for k in sorted(STATES[step])}


def wrapped(wrap, step):
    return lambda state, x: wrap(step)(state, x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=("", "jit", "remat"))
@pytest.mark.parametrize("step", STATES, ids=lambda f: f.__name__)
def test_which_groups_there_are(step, wrap):
    found = hidden_groups(wrapped(wrap, step), state_of(step), X)
    assert [group.names for group in found] == GROUPS[step]
    assert [group.index for group in found] == list(range(len(found)))
    assert {group.diagonal for group in found} == {step in DIAGONAL}


@pytest.mark.parametrize("step", [s for s in STATES if s is not spiking], ids=lambda f: f.__name__)
def test_transitions_and_jacobians(step):
    state = state_of(step)
    whole = jax.jacfwd(lambda s: step(s, X)[0])(state)
    new, _ = step(state, X)
    for group in hidden_groups(step, state, X):
        for name, value in zip(group.names, group.transition(state, X), strict=True):
            np.testing.assert_allclose(value, new[name], atol=1e-12)
        found = group.diagonal_jacobian(state, X)
        assert found.shape == (*group.varshape, group.num_state, group.num_state)
        for a, one in enumerate(group.names):
            for b, other in enumerate(group.names):
                wanted = np.diagonal(np.asarray(whole[one][other]))
                np.testing.assert_allclose(found[:, a, b], wanted, atol=1e-12)
        jitted = jax.jit(group.diagonal_jacobian)(state, X)
        np.testing.assert_allclose(jitted, found, atol=1e-12)


def test_a_derivative_that_is_given_for_the_way_back_alone():
    state = state_of(spiking)
    (group,) = hidden_groups(spiking, state, X)
    v = state["v"]
    spikes, slope = v > 0.1, 1 / (1 + np.abs(v - 0.1)) ** 2
    wanted = 0.9 * (1 - spikes) - 0.9 * v * slope
    np.testing.assert_allclose(group.diagonal_jacobian(state, X)[:, 0, 0], wanted, atol=1e-12)


def test_states_of_different_shapes_are_different_groups():
    state = {"narrow": np.ones(N), "wide": np.ones(2 * N)}
    found = hidden_groups(wide, state, X)
    assert [(g.names, g.varshape) for g in found] == [(("narrow",), (N,)), (("wide",), (2 * N,))]
    whole = jax.jacfwd(lambda s: wide(s, X)[0])(state)
    for group in found:
        (name,) = group.names
        wanted = np.diagonal(np.asarray(whole[name][name]))
        np.testing.assert_allclose(group.diagonal_jacobian(state, X)[:, 0, 0], wanted, atol=1e-12)


def test_units_may_have_several_axes():
    state = {"c": rng.normal(size=(2, N)), "h": rng.normal(size=(2, N))}
    xs = rng.normal(size=(2, N))
    batched = lambda s, x: jax.vmap(lstm)(s, x)
    (group,) = hidden_groups(batched, state, xs)
    found = group.diagonal_jacobian(state, xs)
    assert found.shape == (2, N, 2, 2)
    for i in range(2):
        one = jax.tree.map(lambda v: v[i], state)  # noqa: B023
        (single,) = hidden_groups(lstm, one, xs[i])
        np.testing.assert_allclose(found[i], single.diagonal_jacobian(one, xs[i]), atol=1e-12)


def test_joining_and_splitting():
    (group,) = hidden_groups(lstm, state_of(lstm), X)
    joined = group.concat_hidden([X, 2 * X])
    np.testing.assert_array_equal(joined, np.stack([X, 2 * X], -1))
    first, second = group.split_hidden(joined)
    np.testing.assert_array_equal(first, X)
    np.testing.assert_array_equal(second, 2 * X)
    with pytest.raises(HiddenError, match="`values` has 1 arrays, but the group has 2 hidden"):
        group.concat_hidden([X])
    message = "`joined` has the shape \\[.*, but its last axis must have the size 2, the number of"
    for wrong in (np.zeros((N, 3)), np.zeros((N, 1)), np.zeros(())):
        with pytest.raises(HiddenError, match=message):
            group.split_hidden(wrong)
    assert repr(group) == f"HiddenGroup(c, h: float64[{N}])"
