"""Diagonal rules as estimates, against exact gradients and formulas written out by hand."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from tapax.hidden import online
from tests.hidden.online.test_online import (
    UNITS,
    B,
    H,
    I,
    O,
    array,
    bptt,
    close,
    cosine,
    data,
    learn,
    loss,
    made,
    state_of,
    truth,
    wide,  # noqa: F401
)

pytestmark = pytest.mark.once


def gru(p, h, x):
    r, z = jnp.split(jax.nn.sigmoid(x @ p["i"] + h @ p["h"] + p["b"]), 2, -1)
    n = jnp.tanh(x @ p["in"] + r * (h @ p["hn"]) + p["bn"])
    h = (1 - z) * n + z * h
    return h, h @ p["o"]


GRU = made(i=(I, 2 * H), h=(H, 2 * H), b=(2 * H,), hn=(H, H), bn=(H,), o=(H, O)) | {
    "in": array(I, H, seed=9)
}


def stacked(p, s, x):
    one = 0.8 * s["one"] + jnp.tanh(x @ p["w"])
    two = 0.5 * s["two"] + jnp.tanh(one @ p["v"])
    return {"one": one, "two": two}, two @ p["o"]


STACKED = made(w=(I, H), v=(H, H), o=(H, O))


def normed(p, h, x):
    y = x @ p["w"] + p["u"] * h
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 0.1)
    h = 0.8 * h + jnp.tanh(y)
    return h, h @ p["o"]


NORMED = made(w=(I, H), u=(H,), o=(H, O))
DENSE = {
    "gru": (gru, GRU, 1),
    "stacked": (stacked, STACKED, ("one", "two")),
    "normed": (normed, NORMED, 1),
    "vanilla": (lambda p, h, x: ((h := jnp.tanh(x @ p["w"] + h @ p["v"])), h @ p["o"]), STACKED, 1),
}


@pytest.mark.parametrize("name", [*DENSE, "lstm", "frozen", "looped"])
def test_rtrl_is_exact(name):
    batch = () if name == "gru" else (B,)
    step, params, kind = (UNITS | DENSE)[name]
    state, (xs, ys) = state_of(kind, *batch), data(*batch)
    close(learn(online.rtrl(step, loss), params, state, xs, ys), truth(step, params, state, xs, ys))


@pytest.mark.parametrize("name", DENSE)
def test_estimates_point_the_right_way(name):
    step, params, kind = DENSE[name]
    state, (xs, ys) = state_of(kind, B), data(B)
    value, want = bptt(step, params, state, xs, ys)
    for learner in (
        online.d_rtrl(step, loss),
        online.d_rtrl(step, loss, signal="old"),
        online.pp_prop(step, loss, 0.5),
    ):
        found, grads = learn(learner, params, state, xs, ys)
        np.testing.assert_allclose(found, value)
        assert cosine(grads, want) > (0.75 if name == "vanilla" else 0.9)
        close(grads["o"], want["o"])


def by_hand(step, params, state, xs, ys, carried, signal="new"):
    """Compute diagonal RTRL of one state `h = f(h, W [x, h])` from full Jacobians."""
    flat, back = jax.flatten_util.ravel_pytree(params)
    influence, grads, value = jnp.zeros((H, flat.size)), 0.0, 0.0
    for x, y in zip(xs, ys, strict=True):
        new, out = step(params, state, x)
        now = jax.jacobian(lambda f, h, x: step(back(f), h, x)[0])(flat, state, x)
        if signal == "old":
            of = jax.grad(lambda h, p, x, y: loss(step(p, h, x)[1], y), (0, 1))
            by_h, by_flat = of(state, params, x, y)
        before, influence = influence, carried(params, state, x)[:, None] * influence + now
        if signal == "new":
            of = jax.grad(lambda h, p, y: loss(h @ p["o"], y), (0, 1))
            by_h, by_flat = of(new, params, y)
        grads += by_h @ (influence if signal == "new" else before)
        grads += jax.flatten_util.ravel_pytree(by_flat)[0]
        value, state = value + loss(out, y), new
    return value, back(grads)


@pytest.mark.many
def test_of_a_gru_by_hand():
    """With constant matrices, a unit of a GRU keeps the fraction z of itself."""

    def kept(p, h, x):
        return jax.nn.sigmoid(x @ p["i"] + h @ p["h"] + p["b"])[H:]

    args = GRU, state_of(1), *data()
    for signal in ("new", "old"):
        found = learn(online.d_rtrl(gru, loss, signal=signal), *args)
        close(found, by_hand(gru, *args, kept, signal))


def test_of_a_normalised_state_by_hand():
    """The diagonal comes from the whole Jacobian of the new state by the old one."""

    def kept(p, h, x):
        return jnp.diag(jax.jacobian(lambda h: normed(p, h, x)[0])(h))

    def diagonal(p, h, x):  # keeps only the influence on the unit itself
        y = x @ p["w"] + p["u"] * h
        f = lambda y: jnp.tanh((y - y.mean()) / jnp.sqrt(y.var() + 0.1))
        return jnp.diag(jax.jacobian(f)(y))

    p, h, (xs, ys) = NORMED, state_of(1), data()
    w, u, total = jnp.zeros((I, H)), jnp.zeros(H), jax.tree.map(jnp.zeros_like, p)
    for x, y in zip(xs, ys, strict=True):
        now = jax.grad(lambda p, h, x, y: loss(normed(p, h, x)[1], y))(p, h, x, y)
        total = jax.tree.map(jnp.add, total, now)
        new = normed(p, h, x)[0]
        signal = jax.grad(lambda h, y: loss(h @ p["o"], y))(new, y) * kept(p, h, x)
        total["w"], total["u"] = total["w"] + signal * w, total["u"] + signal * u
        w = kept(p, h, x) * w + diagonal(p, h, x) * x[:, None]
        u = kept(p, h, x) * u + diagonal(p, h, x) * h
        h = new
    for batch in ((), (1,)):
        at = lambda a, batch=batch: a.reshape(*a.shape[:-1], *batch, a.shape[-1])
        found = learn(online.d_rtrl(normed, loss), p, at(state_of(1)), at(xs), at(ys))
        close(found[1], total)


def test_of_stacked_layers_by_hand():
    """The first layer learns from its current effect on the second, not from past effects."""
    p, s, (xs, ys) = STACKED, state_of(("one", "two")), data()
    eps, total = jnp.zeros((I, H)), 0.0
    for x, y in zip(xs, ys, strict=True):
        new, _ = stacked(p, s, x)

        def later(one, s=s, y=y):
            two = 0.5 * s["two"] + jnp.tanh(one @ p["v"])
            return loss(two @ p["o"], y)

        eps = 0.8 * eps + jnp.outer(x, 1 - jnp.tanh(x @ p["w"]) ** 2)
        total, s = total + jax.grad(later)(new["one"]) * eps, new
    grads = learn(online.d_rtrl(stacked, loss), p, state_of(("one", "two")), xs, ys)[1]
    close(grads["w"], total)
    close(grads["v"], bptt(stacked, p, state_of(("one", "two")), xs, ys)[1]["v"])
