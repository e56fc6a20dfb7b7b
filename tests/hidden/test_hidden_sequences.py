"""Hidden states of a sequence and their gradients, against backpropagation by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tapax.hidden import HiddenError, mark_states

T, B, D, H = 12, 2, 3, 4


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru_params(rng, width, hidden):
    def weights(rows):
        return {g: rng.normal(size=(rows, hidden)) / np.sqrt(rows) for g in "zrn"}

    return {"w": weights(width), "u": weights(hidden), "b": weights(1)}


def gru(p, h, x):
    z = jax.nn.sigmoid(x @ p["w"]["z"] + h @ p["u"]["z"] + p["b"]["z"])
    r = jax.nn.sigmoid(x @ p["w"]["r"] + h @ p["u"]["r"] + p["b"]["r"])
    n = jnp.tanh(x @ p["w"]["n"] + r * (h @ p["u"]["n"]) + p["b"]["n"])
    return (1 - z) * n + z * h


class ByHand:
    """A GRU in NumPy, with its derivative written out."""

    def __init__(self, p):
        self.w, self.u, self.b = p["w"], p["u"], p["b"]

    def forward(self, h, x):
        z = sigmoid(x @ self.w["z"] + h @ self.u["z"] + self.b["z"])
        r = sigmoid(x @ self.w["r"] + h @ self.u["r"] + self.b["r"])
        a = h @ self.u["n"]
        n = np.tanh(x @ self.w["n"] + r * a + self.b["n"])
        return (1 - z) * n + z * h, (h, z, r, a, n)

    def backward(self, saved, ct):
        """Return the gradients with respect to the old state and the input."""
        h, z, r, a, n = saved
        dz = ct * (h - n) * z * (1 - z)
        dn = ct * (1 - z) * (1 - n**2)
        dr = dn * a * r * (1 - r)
        by_h = ct * z + dz @ self.u["z"].T + dr @ self.u["r"].T + (dn * r) @ self.u["n"].T
        by_x = dz @ self.w["z"].T + dr @ self.w["r"].T + dn @ self.w["n"].T
        return by_h, by_x


def two_layers(length, rng):
    params = {
        "l1": gru_params(rng, D, H),
        "l2": gru_params(rng, H, H),
        "out": rng.normal(size=(H, 2)),
    }
    xs, ys = rng.normal(size=(length, B, D)), rng.normal(size=(length, B, 2))
    start = {k: rng.normal(size=(B, H)) for k in ("h1", "h2")}
    return params, start, xs, ys


def cells(params, state, x):
    h1 = gru(params["l1"], state["h1"], x)
    h2 = gru(params["l2"], state["h2"], h1)
    return {"h1": h1, "h2": h2}, h2 @ params["out"]


def bptt(params, start, xs, ys):
    """Compute the loss, all states, and the gradient by each state, step by step."""
    layers = ByHand(params["l1"]), ByHand(params["l2"])
    h1, h2, saved, states, loss, errors = start["h1"], start["h2"], [], [], 0.0, []
    for x, y in zip(xs, ys, strict=True):
        h1, s1 = layers[0].forward(h1, x)
        h2, s2 = layers[1].forward(h2, h1)
        errors.append(h2 @ params["out"] - y)
        loss += np.sum(errors[-1] ** 2)
        saved.append((s1, s2))
        states.append((h1, h2))
    loss += np.sum(np.sin(h1)) + np.sum(h2**3)
    g1, g2, grads = np.cos(h1), 3 * h2**2, []
    for (s1, s2), error in zip(reversed(saved), reversed(errors), strict=True):
        g2 = g2 + 2 * error @ params["out"].T
        older2, through = layers[1].backward(s2, g2)
        g1 = g1 + through
        grads.append((g1, g2))
        g1, _ = layers[0].backward(s1, g1)
        g2 = older2
    names = ("h1", "h2")
    values = dict(zip(names, map(np.stack, zip(*states, strict=True)), strict=True))
    by_state = dict(zip(names, map(np.stack, zip(*reversed(grads), strict=True)), strict=True))
    return loss, values, by_state


def loss_of(wrap):
    def loss(params, start, xs, ys):
        def step(state, x):
            return cells(params, state, x)

        last, outs = lax.scan(mark_states(wrap(step)), start, xs)
        return jnp.sum((outs - ys) ** 2) + jnp.sum(jnp.sin(last["h1"])) + jnp.sum(last["h2"] ** 3)

    return loss


WRAPS = {"plain": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}


@pytest.mark.parametrize(
    ("wrap", "compiled"),
    [
        ("plain", False),
        ("remat", True),
        *(
            pytest.param(*how, marks=pytest.mark.many)
            for how in (("plain", True), ("jit", False), ("jit", True), ("remat", False))
        ),
    ],
)
def test_two_layers_against_bptt_by_hand(wrap, compiled):
    arguments = two_layers(T, np.random.default_rng(1))
    step = jax.value_and_grad(loss_of(WRAPS[wrap]))
    step = jax.jit(step) if compiled else step
    (value, grads), taps = tapax.capture(step)(*arguments)
    loss, values, by_state = bptt(*arguments)
    np.testing.assert_allclose(value, loss, rtol=1e-12)
    assert set(taps.values) == set(taps.grads) == {"h1", "h2"}
    for name in values:
        np.testing.assert_allclose(taps.values[name], values[name], atol=1e-12)
        np.testing.assert_allclose(taps.grads[name], by_state[name], atol=1e-12)
    plain = jax.grad(loss_of(lambda f: f))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), grads, plain)


def test_a_hundred_steps():
    arguments = two_layers(100, np.random.default_rng(2))
    _, taps = tapax.capture(jax.grad(loss_of(lambda f: f)))(*arguments)
    _, _, by_state = bptt(*arguments)
    for name in by_state:
        np.testing.assert_allclose(taps.grads[name], by_state[name], rtol=1e-12, atol=1e-12)


def test_it_is_the_step_itself_outside_of_a_capture():
    params, start, xs, _ = two_layers(T, np.random.default_rng(3))
    step = lambda s, x: cells(params, s, x)
    plain = jax.make_jaxpr(lambda xs: lax.scan(step, start, xs))(xs)
    marked = jax.make_jaxpr(lambda xs: lax.scan(mark_states(step), start, xs))(xs)
    assert str(plain) == str(marked)


def test_nothing_is_added_to_the_backward_pass():
    arguments = two_layers(T, np.random.default_rng(4))

    def memory(fn):
        return jax.jit(fn).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    plain = jax.grad(loss_of(lambda f: f))
    captured = tapax.capture(plain, values=None, grads=("h1", "h2"))
    result = 2 * T * B * H * 8
    assert memory(captured) <= memory(plain) + 1.5 * result


def test_names_are_those_of_the_state_wherever_it_is_defined():
    @jax.jit
    def inner(h, x):
        with tapax.scope("inside"):
            h = tapax.sow(jnp.tanh(h + x), "act") * 2
        return h, jnp.sum(h)

    def outer(xs):
        with tapax.scope("rnn"):
            return lax.scan(mark_states(jax.checkpoint(inner)), jnp.zeros(H), xs)[1].sum()

    _, taps = tapax.capture(jax.grad(outer))(np.ones((T, H)))
    assert set(taps.values) == {"rnn/h", "rnn/inside/act"}
    assert taps.grads["rnn/h"].shape == (T, H)
    assert taps.sites["rnn/h"].kind == "hidden"


def test_states_of_a_module_have_the_line_that_marks_them():
    class Cell:
        def __call__(self, h, x):
            return (jnp.tanh(h + x),) * 2

    step = mark_states(Cell())
    _, taps = tapax.capture(lambda xs: lax.scan(step, jnp.zeros(H), xs)[1])(np.ones((T, H)))
    assert taps.sites["h"].source.startswith(__file__)


def test_statistics_and_batches():
    def loss(w, xs):
        step = lambda h, x: (jnp.tanh(w * h + x),) * 2
        return jnp.sum(lax.scan(mark_states(step), jnp.zeros(H), xs)[1] ** 2)

    xs = np.random.default_rng(5).normal(size=(B, T, H))
    batched = jax.vmap(jax.grad(loss), in_axes=(None, 0))
    _, full = tapax.capture(batched)(0.5, xs)
    _, taps = tapax.capture(batched, values=None, grads={"h": tapax.reduce.rms})(0.5, xs)
    assert full.grads["h"].shape == (T, B, H)
    wanted = np.sqrt(np.mean(np.square(full.grads["h"]), axis=(1, 2)))
    np.testing.assert_allclose(taps.grads["h"], wanted, rtol=1e-6, atol=1e-12)


def test_a_conditional_has_a_site_in_each_branch():
    def step(h, x):
        return lax.cond(x.sum() > 0, lambda: ((g := jnp.tanh(h + x)), g * 3), lambda: (h, h * 0))

    def loss(w, xs):
        return jnp.sum(lax.scan(mark_states(step), jnp.zeros(H), w * xs)[1])

    xs = np.random.default_rng(6).normal(size=(T, H))
    _, taps = tapax.capture(jax.grad(loss))(1.0, xs)
    total = sum(taps.grads[name] for name in taps.grads)

    def by_hand(p):
        h, out = np.zeros(H), 0.0
        for t in range(T):
            if xs[t].sum() > 0:
                h = jnp.tanh(h + xs[t]) + p[t]
                out += jnp.sum(h * 3)
            else:
                h = h + p[t]
        return out

    np.testing.assert_allclose(total, jax.grad(by_hand)(jnp.zeros((T, H))), atol=1e-12)


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="`mark_states` takes a function"):
        mark_states(3)
    step = mark_states(lambda h, x: (h[:1], x))
    with pytest.raises(HiddenError, match=r"enters .* with shape \[4\] and leaves it with"):
        tapax.capture(lambda x: step(jnp.zeros(H), x))(1.0)


def test_a_state_without_gradients_beside_others():
    """An integer count in the state is not a hidden state, and passes through unchanged."""

    def step(state, x):
        h, n = state
        return (jnp.tanh(h + x), n + 1), h

    def loss(xs):
        (h, n), _ = lax.scan(mark_states(step), (jnp.zeros(H), 0), xs)
        return jnp.sum(h) + n

    value, taps = tapax.capture(jax.value_and_grad(loss))(np.ones((T, H)))
    assert set(taps.grads) == {"0"}
    np.testing.assert_allclose(value[0], loss(np.ones((T, H))))
