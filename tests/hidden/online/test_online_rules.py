"""e-prop and pp-prop against the formulas of their papers, and errors for other steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapax.hidden import HiddenError, online

pytestmark = pytest.mark.once

I, H, O, T = 3, 5, 2, 12
ALPHA, RHO, BETA, KAPPA = 0.9, 0.95, 0.3, 0.8


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def array(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def surrogate(v):
    return 0.3 * np.maximum(0, 1 - np.abs(v))


@jax.custom_vjp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, g: (g * 0.3 * jnp.maximum(0, 1 - jnp.abs(v)),))


def alif(p, s, x):
    """Step adaptive leaky integrate-and-fire neurons with a leaky read-out (Bellec et al.)."""
    v = ALPHA * s["v"] + x @ p["in"] + s["z"] @ p["rec"] - jax.lax.stop_gradient(s["z"])
    a = RHO * s["a"] + s["z"]
    z = spike(v - 1 - BETA * a)
    y = KAPPA * s["y"] + z @ p["out"] + p["bias"]
    return {"v": v, "a": a, "z": z, "y": y}, y


PARAMS = {"in": array(I, H) * 1.5, "rec": array(H, H) * 0.4, "out": array(H, O), "bias": array(O)}
STATE = {"v": np.zeros(H), "a": np.zeros(H), "z": np.zeros(H), "y": np.zeros(O)}


def half(out, target):
    return 0.5 * ((out - target) ** 2).sum()


def eligibility(xs, ys, matrix, kappa):
    """Compute eligibility vectors, traces and learning signal by equations 22 to 28."""
    p = PARAMS
    v, a, z, y, zbar, one = (np.zeros(n) for n in (H, H, H, O, H, 1))
    eps_v = {"in": np.zeros(I), "rec": np.zeros(H)}
    eps_a, ebar = ({k: np.zeros((n, H)) for k, n in (("in", I), ("rec", H))} for _ in range(2))
    grads = {k: np.zeros_like(w) for k, w in p.items()}
    psi = np.zeros(H)
    for x, target in zip(xs, ys, strict=True):
        for k in eps_a:  # the recursion of the paper, with the values of the previous step
            eps_a[k] = psi * eps_v[k][:, None] + (RHO - psi * BETA) * eps_a[k]
        eps_v = {"in": ALPHA * eps_v["in"] + x, "rec": ALPHA * eps_v["rec"] + z}
        v = ALPHA * v + x @ p["in"] + z @ p["rec"] - z
        a = RHO * a + z
        psi = surrogate(v - 1 - BETA * a)
        z = (v - 1 - BETA * a > 0).astype(float)
        y = KAPPA * y + z @ p["out"] + p["bias"]
        zbar, one = KAPPA * zbar + z, KAPPA * one + 1
        for k in ebar:
            ebar[k] = kappa * ebar[k] + psi * (eps_v[k][:, None] - BETA * eps_a[k])
            grads[k] += ((y - target) @ matrix) * ebar[k]
        grads["out"] += np.outer(zbar, y - target)
        grads["bias"] += one * (y - target)
    return grads


@functools.partial(jax.jit, static_argnums=0)
def learned(learner, memory, xs, ys):
    step = lambda memory, xy: learner.update(memory, PARAMS, xy[0], target=xy[1])[::-1]
    _, found = jax.lax.scan(step, memory, (xs, ys))
    return jax.tree.map(lambda g: g.sum(0), found.grads)


@pytest.mark.parametrize("feedback", ["symmetric", "random"])
@pytest.mark.parametrize("kappa", [KAPPA, 0.0])
def test_e_prop_of_spiking_neurons_by_hand(feedback, kappa):
    key = jax.random.key(3) if feedback == "random" else None
    learner = online.e_prop(alif, half, feedback=feedback, decay=kappa, key=key)
    xs, ys = array(T, I, seed=1), array(T, O, seed=2)
    memory = learner.init(PARAMS, STATE, xs[0])
    matrix = PARAMS["out"].T if key is None else None
    if matrix is None:
        ((matrix,),) = (
            memory.feedback.values()
        )  # for the spikes; the read-out has its exact gradient
    found, want = learned(learner, memory, xs, ys), eligibility(xs, ys, matrix, kappa)
    assert np.abs(want["rec"]).max() > 0.1
    for k in want:
        np.testing.assert_allclose(found[k], want[k], rtol=1e-10, atol=1e-10)


def gated(p, h, x):
    z = jax.nn.sigmoid(x @ p["z"] + h @ p["u"])
    h = z * h + (1 - z) * jnp.tanh(x @ p["w"] + p["b"])
    return h, h @ p["o"]


def test_pp_prop_by_hand():
    """pp-prop smooths two vectors for each matrix, and corrects the second for its start."""
    a, B = 0.7, 2
    p = {
        k: array(*s, seed=i) * 0.5
        for i, (k, s) in enumerate(
            {"z": (I, H), "u": (H, H), "w": (I, H), "b": (H,), "o": (H, O)}.items()
        )
    }
    xs, ys, h = array(T, B, I, seed=1), array(T, B, O, seed=2), array(B, H, seed=3)
    data = {"z": np.zeros((B, I)), "u": np.zeros((B, H)), "w": np.zeros((B, I))}
    units = {k: np.zeros((B, H)) for k in data}
    bias, grads = np.zeros((B, H)), {k: np.zeros_like(w) for k, w in p.items()}
    state = h
    for t, (x, y) in enumerate(zip(xs, ys, strict=True)):
        z = 1 / (1 + np.exp(-(x @ p["z"] + h @ p["u"])))
        n = np.tanh(x @ p["w"] + p["b"])
        by = {"z": z * (1 - z) * (h - n), "w": (1 - z) * (1 - n**2)}
        by["u"] = by["z"]
        for k, given in (("z", x), ("u", h), ("w", x)):
            data[k] = a * data[k] + given
            units[k] = a * z * units[k] + (1 - a) * by[k]
        bias = z * bias + by["w"]
        h = z * h + (1 - z) * n
        error = h @ p["o"] - y
        signal = error @ p["o"].T
        for k in data:
            grads[k] += data[k].T @ (signal * units[k]) / (1 - a ** (t + 1))
        grads["b"] += (signal * bias).sum(0)
        grads["o"] += h.T @ error
    learner = online.pp_prop(gated, half, a)

    def run(params, state, xs, ys):
        step = lambda m, xy: learner.update(m, params, xy[0], target=xy[1])[::-1]
        return jax.lax.scan(step, learner.init(params, state, xs[0]), (xs, ys))[1].grads

    found = jax.jit(run)(p, state, xs, ys)
    for k, want in grads.items():
        np.testing.assert_allclose(found[k].sum(0), want, rtol=1e-10, atol=1e-10)


def dense(p, h, x):
    h = jnp.tanh(0.5 * h + jnp.tanh(x @ p["e"]) @ p["w"])
    return h, h @ p["o"]


DENSE = {"e": array(I, 4), "w": array(4, H), "o": array(H, O)}


@pytest.mark.parametrize(
    "rule",
    [online.d_rtrl, online.e_prop, functools.partial(online.pp_prop, decay=0.5)],
    ids=["d_rtrl", "e_prop", "pp_prop"],
)
def test_parameters_that_drive_many_units(rule):
    """A rule keeps their full influence, keeps only that within the step, or raises."""
    h, x, y = array(H, seed=5), array(I, seed=6), array(O, seed=7)
    sizes, grads = {}, {}
    for how in ("trace", "instant"):
        learner = rule(dense, half, indirect=how)
        memory = learner.init(DENSE, h, x)
        sizes[how] = sum(t.size for t in jax.tree.leaves(memory.traces))
        update = jax.jit(learner.update)
        found, memory = update(memory, DENSE, x, target=y)
        grads[how] = update(memory, DENSE, x, target=y)[0].grads["e"]
        within = jax.grad(lambda p, h: half(dense(p, h, x)[1], y))
        np.testing.assert_allclose(found.grads["e"], within(DENSE, h)["e"])
        now = within(DENSE, dense(DENSE, h, x)[0])
        assert np.allclose(grads[how], now["e"]) == (how == "instant")
    assert sizes["trace"] - sizes["instant"] == H * DENSE["e"].size
    with pytest.raises(HiddenError) as caught:
        rule(dense, half, indirect="refuse").init(DENSE, h, x)
    assert str(caught.value) == (
        "The parameter ['e'] of dense drives many units of the hidden state h, so its trace would "
        "have 12 times the size of the state, and `indirect` is 'refuse'. Pass 'trace' to keep the "
        "trace, or 'instant' to learn only from the influence within a step."
    )


def leaky(p, h, x):
    h = 0.5 * h + x @ p["w"]
    return h, h


P, X = {"w": np.ones((I, H))}, np.ones(I)


def new(step, state=None, params=None, *inputs):
    state = np.zeros(H) if state is None else state
    return lambda: online.d_rtrl(step, half).init(P if params is None else params, state, *inputs)


REFUSED = {
    "structure": (
        new(lambda p, h, x: ((h, h), h), None, None, X),
        "A step must return a state like",
    ),
    "shape": (
        new(lambda p, h, x: (h[1:], h), None, None, X),
        "The hidden state 'h' enters .* with shape \\[5\\] and leaves it with shape \\[4\\]",
    ),
    "dtype": (
        new(lambda p, h, x: (h.astype(jnp.float32), h), None, None, X),
        "with type float64 and leaves it with type float32",
    ),
    "integers": (
        new(leaky, np.zeros(H, np.int32), None, X),
        "The hidden state 'h' is of type int32, but a hidden state must have a floating-point",
    ),
    "complex": (
        new(leaky, np.zeros(H, complex), None, X),
        "The hidden state 'h' is of type complex128, but online learning needs states of a real",
    ),
    "one result": (new(lambda p, h, x: h, None, None, X), "a step must return a pair"),
    "no state": (new(leaky, {}, None, X), "a step needs at least one hidden state"),
    "no parameters": (
        new(leaky, None, {"w": np.ones((I, H), np.int32)}, X),
        "`params` must contain arrays of a real floating-point type, which can be learned, "
        "but the types of its leaves are int32.",
    ),
    "empty": (new(leaky, None, {}, X), "but the types of its leaves are none."),
    "step": (lambda: online.rtrl(None, half), "`step` must be a function .* but is None"),
    "loss": (lambda: online.rtrl(leaky, 3.0), "`loss` must be a function .* but is 3.0"),
    "decay": (
        lambda: online.pp_prop(leaky, half, 1.0),
        r"`decay` must be a number in \[0, 1\), but is 1.0",
    ),
    "negative": (lambda: online.e_prop(leaky, half, decay=-0.1), "but is -0.1"),
    "no number": (lambda: online.pp_prop(leaky, half, "slow"), "but is 'slow'"),
    "nan": (lambda: online.pp_prop(leaky, half, float("nan")), "but is nan"),
    "feedback": (
        lambda: online.e_prop(leaky, half, feedback="direct"),
        "`feedback` must be 'symmetric' or 'random', but is 'direct'.",
    ),
    "no key": (
        lambda: online.e_prop(leaky, half, feedback="random"),
        "`feedback` is 'random' and `key` is None, but random feedback needs a random key",
    ),
    "a key": (
        lambda: online.e_prop(leaky, half, key=jax.random.key(0)),
        "`feedback` is 'symmetric' and `key` is not None",
    ),
    "indirect": (
        lambda: online.d_rtrl(leaky, half, indirect="drop"),
        "`indirect` must be one of 'trace', 'instant', 'refuse', but is 'drop'.",
    ),
    "signal": (
        lambda: online.d_rtrl(leaky, half, signal="h"),
        "`signal` must be one of 'new', 'old', but is 'h'.",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_steps_that_rules_refuse(what):
    call, message = REFUSED[what]
    with pytest.raises(HiddenError, match=message):
        call()


@pytest.mark.parametrize("rule", [online.rtrl, online.d_rtrl, online.e_prop])
def test_refused_at_a_step(rule):
    vector = rule(leaky, lambda out, target: out - target)
    memory = vector.init(P, np.zeros(H), X)
    message = r"returned an array of shape \[5\] and type float64, but must return one real"
    with pytest.raises(HiddenError, match=message):
        vector.update(memory, P, X, target=np.ones(H))
    learner = rule(leaky, half)
    with pytest.raises(
        HiddenError, match="`memory` must come from `init` or `update`, but is a dict"
    ):
        learner.update({}, P, X, target=np.ones(H))
    other = learner.init({"w": np.ones((I + 1, H))}, np.zeros(H), np.ones(I + 1))
    with pytest.raises(HiddenError, match=r"but these parameters and inputs need"):
        learner.update(other, P, X, target=np.ones(H))


def test_a_while_loop_says_that_it_has_no_gradient():
    def step(p, h, x):
        h = jax.lax.while_loop(lambda h: (h**2).sum() > 1, lambda h: 0.5 * h, h + x @ p["w"])
        return h, h

    learner = online.d_rtrl(step, half)
    memory = learner.init(P, np.zeros(H), X)
    with pytest.raises(ValueError, match="while_loop"):
        learner.update(memory, P, X, target=np.ones(H))
