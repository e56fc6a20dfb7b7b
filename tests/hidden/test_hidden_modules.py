"""Recurrent modules of Flax, Equinox and Haiku, against eager runs of the modules."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import tapax
from tapax.hidden import HiddenError, add_hidden_perturbation, functional, hidden_groups
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

rng = np.random.default_rng(0)
X = jnp.asarray(rng.normal(size=3), jnp.float32)
BATCH = jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)
IMAGES = jnp.asarray(rng.normal(size=(2, 5, 5, 3)), jnp.float32)
KEY = jax.random.key(0)


def bound(cell, x):
    carry = cell.initialize_carry(KEY, x.shape)
    return cell.bind(cell.init(KEY, carry, x))


def nnx_cell(cls):
    return lambda x: cls(3, 4, rngs=nnx.Rngs(0))


CELLS = {
    "nnx GRU": (nnx_cell(nnx.GRUCell), X, "h"),
    "nnx simple, batched": (nnx_cell(nnx.SimpleCell), BATCH, "h"),
    "nnx LSTM": (nnx_cell(nnx.LSTMCell), X, "c h"),
    "nnx optimized LSTM, batched": (nnx_cell(nnx.OptimizedLSTMCell), BATCH, "c h"),
    "linen GRU": (lambda x: bound(nn.GRUCell(4), x), BATCH, "h"),
    "linen MGU": (lambda x: bound(nn.MGUCell(4), x), X, "h"),
    "linen simple": (lambda x: bound(nn.SimpleCell(4), x), X, "h"),
    "linen LSTM": (lambda x: bound(nn.LSTMCell(4), x), X, "c h"),
    "linen optimized LSTM": (lambda x: bound(nn.OptimizedLSTMCell(4), x), BATCH, "c h"),
    "linen conv LSTM": (lambda x: bound(nn.ConvLSTMCell(4, (3, 3)), x), IMAGES, "c h"),
    "equinox GRU": (lambda x: eqx.nn.GRUCell(3, 4, key=KEY), X, "h"),
    "equinox LSTM": (lambda x: eqx.nn.LSTMCell(3, 4, key=KEY), X, "h c"),
}


def called(cell, state, x):
    """Run the cell itself: return its new state and its output."""
    if isinstance(cell, eqx.Module):
        new = cell(x, state)
        return new, new[0] if isinstance(new, tuple) else new
    return cell(state, x)


def close(a, b, tol=1e-5):
    assert_close(a, b, tol)


def random_like(tree):
    return jax.tree.map(lambda v: jnp.asarray(rng.normal(size=v.shape), v.dtype), tree)


@pytest.mark.parametrize("name", CELLS)
def test_hidden_states_of_framework_cells(name):
    make, x, states = CELLS[name]
    cell = make(x)
    p = add_hidden_perturbation(cell, x)
    assert isinstance(p, tapax.hidden.HiddenPerturbation)
    assert list(p.names) == states.split()
    step, params, state = functional(cell, x)
    state = random_like(state)
    wanted = called(cell, state, x)
    jax.tree.map(close, p(p.zeros(), state, x), wanted)
    jax.tree.map(close, step(params, state, x), wanted)
    jax.tree.map(
        close,
        p.eval_jaxpr(jax.tree.leaves((state, x)), p.init_perturb_data()),
        jax.tree.leaves(wanted),
    )
    # The output of the cell is its state h, which depends on c.
    weights = random_like(wanted)
    total = lambda q: sum(
        jnp.vdot(w, v)
        for w, v in zip(*map(jax.tree.leaves, (weights, p(q, state, x))), strict=True)
    )
    grads = jax.grad(total)(p.zeros())
    named = dict(zip(p.names, jax.tree.leaves(weights[0]), strict=True))
    close(grads["h"], named["h"] + weights[1])
    if "c" in grads:
        h = dict(zip(p.names, jax.tree.leaves(wanted[0]), strict=True))
        # h = o * tanh(c), so that dh/dc is h / tanh(c) * (1 - tanh(c)**2).
        slope = h["h"] / jnp.tanh(h["c"]) * (1 - jnp.tanh(h["c"]) ** 2)
        close(grads["c"], named["c"] + (named["h"] + weights[1]) * slope, 1e-4)


@pytest.mark.parametrize("name", CELLS)
def test_groups_of_cells(name):
    make, x, states = CELLS[name]
    cell = make(x)
    (group,) = hidden_groups(cell, x)
    assert list(group.names) == states.split()
    p = add_hidden_perturbation(cell, x)
    state = random_like(functional(cell, x).state)
    (joined,) = p.perturb_data_to_hidden_group_data(p.init_perturb_data(), [group])
    assert joined.shape == (*group.varshape, len(states.split()))
    jax.tree.map(close, group.transition(state, x), jax.tree.leaves(called(cell, state, x)[0]))


def test_the_diagonal_of_an_lstm_is_its_forget_gate():
    cell = nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
    (group,) = hidden_groups(cell, X)
    state = random_like(functional(cell, X).state)
    whole = jax.jacfwd(lambda s: cell(s, X)[0])(state)
    found = group.diagonal_jacobian(state, X)
    for a in range(2):
        for b in range(2):
            close(found[:, a, b], jnp.diagonal(whole[a][b]))


CORES = {
    "GRU": (lambda: hk.GRU(4), X, ("h",)),
    "vanilla": (lambda: hk.VanillaRNN(4), BATCH, ("h",)),
    "LSTM": (lambda: hk.LSTM(4), BATCH, ("hidden", "cell")),
    "conv LSTM": (lambda: hk.Conv2DLSTM((5, 5), 4, 3), IMAGES, ("hidden", "cell")),
    "deep": (
        lambda: hk.DeepRNN([hk.GRU(4), jax.nn.relu, hk.LSTM(5)]),
        X,
        ("0", "1/hidden", "1/cell"),
    ),
}


@pytest.mark.parametrize("name", CORES)
def test_cores_of_haiku(name):
    make, x, states = CORES[name]

    def run(x):
        core = make()
        p = add_hidden_perturbation(core, x)
        assert p.names == states
        batch = None if x is X or x.ndim == 1 else x.shape[0]
        state = jax.tree.map(lambda v: v + 0.3, core.initial_state(batch))
        out, new = core(x, state)
        return (
            p(p.zeros(), state, x),
            (new, out),
            p({states[-1]: p.zeros()[states[-1]] + 1}, state, x),
        )

    pair = hk.transform(run)
    params = pair.init(KEY, x)
    got, wanted, moved = pair.apply(params, None, x)
    jax.tree.map(close, got, wanted)
    close(jax.tree.leaves(moved[0])[-1], jax.tree.leaves(wanted[0])[-1] + 1)


def test_a_core_that_takes_a_pair():
    reset = jnp.array([True] + [False] * (len(BATCH) - 1))

    def run(x):
        core = hk.ResetCore(hk.LSTM(4))
        p = add_hidden_perturbation(core, (x, reset))
        state = jax.tree.map(lambda v: v + 0.3, core.initial_state(len(x)))
        assert p.names == ("hidden", "cell")
        return p({}, state, (x, reset)), core((x, reset), state)[::-1]

    pair = hk.transform(run)
    jax.tree.map(close, *pair.apply(pair.init(KEY, BATCH), None, BATCH))


@pytest.mark.parametrize(
    "make",
    [lambda: nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), lambda: bound(nn.GRUCell(4), X)],
    ids=["nnx", "linen"],
)
def test_the_input_of_a_cell_by_keyword(make):
    cell = make()
    p = add_hidden_perturbation(cell, inputs=X)
    h = jnp.full(4, 0.3)
    jax.tree.map(close, p({}, h, inputs=X), cell(h, X))


class Stack(nnx.Module):
    """Two cells and a read-out, called as a step."""

    def __init__(self, rngs):
        self.first = nnx.GRUCell(3, 4, rngs=rngs)
        self.second = nnx.LSTMCell(4, 4, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)

    @nnx.jit
    def __call__(self, state, x):
        h, y = self.first(state["first"], x)
        carry, y = self.second(state["second"], y)
        return {"first": h, "second": carry}, self.out(y)


def test_a_model_that_is_called_as_a_step():
    model = Stack(nnx.Rngs(0))
    zeros = jnp.zeros(4)
    state = random_like({"first": zeros, "second": (zeros, zeros)})
    p = add_hidden_perturbation(model, X, state=state)
    assert p.names == ("first", "second/0", "second/1")
    jax.tree.map(close, p(p.zeros(), state, X), model(state, X))
    grads = jax.grad(lambda q: jnp.sum(p(q, state, X)[1]))(p.zeros())
    close(grads["second/1"], model.out.kernel[...].sum(1))
    groups = hidden_groups(model, X, state=state)
    assert [g.names for g in groups] == [("first",), ("second/0", "second/1")]
    # The model is unchanged, and trains.
    nnx.grad(lambda m: jnp.sum(m(state, X)[1]))(model)


def test_sites_inside_of_a_cell_in_a_scan():
    """One backward pass gives the gradients of the states and layers of a Flax cell."""
    cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    xs = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)

    def loss(cell, xs):
        _, ys = jax.lax.scan(tapax.hidden.mark_states(cell), jnp.zeros(4), xs)
        return jnp.sum(ys**2)

    _, taps = tapax.capture(nnx.grad(loss))(cell, xs)
    assert taps.grads["h"].shape == (6, 4)
    assert "GRUCell/dense_i" in taps.values

    def by_hand(p):
        h, total = jnp.zeros(4), 0.0
        for x, added in zip(xs, p, strict=True):
            h = cell(h, x)[0] + added
            total += jnp.sum(h**2)
        return total

    close(taps.grads["h"], jax.grad(by_hand)(jnp.zeros((6, 4))))


def refusal(model, *inputs, **kwargs):
    with pytest.raises(HiddenError) as info:
        add_hidden_perturbation(model, *inputs, **kwargs)
    return str(info.value)


def test_bad_arguments_are_refused():
    assert refusal(nn.GRUCell(4), X) == (
        "`model` is a GRUCell without parameters, because it is not bound to variables. Give "
        "model.bind(variables)."
    )
    assert "runs its cell over a whole sequence" in refusal(
        nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))), X
    )
    assert "does not define its hidden state" in refusal(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), X)
    assert "but must be a recurrent module" in refusal(lambda s, x: (s, x), X)
    cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    assert "must have a floating-point type" in refusal(cell, X, state=jnp.arange(4))
    assert refusal(cell).startswith("`inputs` is empty, but tapax traces GRUCell with an")
    (group,) = hidden_groups(cell, X)
    with pytest.raises(HiddenError, match=r"^GRUCell was traced for an argument of shape \[4\]"):
        group.transition(jnp.zeros(5), X)


def test_modules_take_inputs_by_keyword():
    class Scaled(nnx.Module):
        def __init__(self):
            self.cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))

        def __call__(self, h, x, *, scale):
            return self.cell(h, scale * x)

    model, h = Scaled(), jnp.ones(4)
    p = add_hidden_perturbation(model, X, state=h, scale=2.0)
    wanted = model.cell(h, 3.0 * X)
    jax.tree.map(close, p({}, h, X, scale=3.0), wanted)
    step, params, state = functional(model, X, state=h, scale=2.0)
    jax.tree.map(close, step(params, state, X, scale=3.0), wanted)
    marked = tapax.hidden.mark_states(model)
    for scale in (2.0, 3.0):
        _, taps = tapax.capture(lambda s: marked(h, X, scale=s))(scale)
    close(taps.values["h"], wanted[0])
