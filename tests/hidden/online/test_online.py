"""Online learning, against backpropagation through time in a Python loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapax.hidden import online

I, H, O, B, T = 3, 4, 2, 2, 6


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def array(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape) * 0.6


def made(**shapes):
    return {k: array(*s, seed=i) for i, (k, s) in enumerate(shapes.items())}


def loss(out, target):
    return sum(((o - target) ** 2).sum() for o in jax.tree.leaves(out))


def bptt(step, params, state, xs, ys):
    """Return the loss of a sequence and its gradient, by differentiating the whole sequence."""

    def total(params):
        def one(carry, xy):
            state, value = carry
            state, out = step(params, state, xy[0])
            return (state, value + loss(out, xy[1])), None

        return jax.lax.scan(one, (state, jnp.zeros(())), (xs, ys))[0][1]

    return jax.jit(jax.value_and_grad(total))(params)


def learn(learner, params, state, xs, ys):
    """Return the loss of a sequence and its gradient, learned step by step."""

    def run(params, state, xs, ys):
        def one(memory, xy):
            return learner.update(memory, params, xy[0], target=xy[1])[::-1]

        _, learned = jax.lax.scan(one, learner.init(params, state, xs[0]), (xs, ys))
        return learned.loss.sum(), jax.tree.map(lambda g: g.sum(0), learned.grads)

    return jax.jit(run)(params, state, xs, ys)


def close(a, b, tolerance=1e-10):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def cosine(a, b):
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@jax.custom_vjp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, g: (g / (1 + jnp.abs(v)) ** 2,))


@jax.custom_jvp
def soft_spike(v):
    return jnp.heaviside(v, 0.0)


soft_spike.defjvp(lambda v, t: (soft_spike(*v), t[0] * jnp.exp(-(v[0] ** 2))))


# Each unit of these states acts only on itself, so the diagonal rules are exact.


def leaky(p, h, x):
    a = jax.nn.sigmoid(p["a"])
    h = a * h + (1 - a) * jnp.tanh(x @ p["w"] + p["b"])
    return h, h @ p["o"] + p["c"]


def gated(p, h, x):
    z, n = jnp.split(x @ p["w"] + p["b"] + jnp.concatenate([h, h], -1) * p["u"], 2, -1)
    h = jax.nn.sigmoid(z) * h + jax.nn.sigmoid(-z) * jnp.tanh(n)
    return h, h @ p["o"]


def lstm(p, s, x):
    pre = jnp.concatenate([x @ w for w in p["w"]], -1).reshape(*x.shape[:-1], 4, H)
    pre = pre + p["u"] * s["h"][..., None, :]
    i, f, g, o = (pre[..., k, :] for k in range(4))
    c = jax.nn.sigmoid(f) * s["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return {"c": c, "h": h}, h @ p["o"]


def lru(p, s, x):
    radius, angle = jnp.exp(-jnp.exp(p["nu"])), jnp.exp(p["theta"])
    re, im = radius * jnp.cos(angle), radius * jnp.sin(angle)
    new = re * s[0] - im * s[1] + x @ p["b0"], im * s[0] + re * s[1] + x @ p["b1"].T
    return new, jnp.concatenate(new, -1) @ p["o"]


def lif(spike, p, s, x):
    v = jax.nn.sigmoid(p["a"]) * s["v"] + x @ p["w"] - 0.5 * s["z"]
    z = spike(v - 0.2)
    return {"v": v, "z": z}, z @ p["o"]


def read_beside(p, v, x):
    """Read an output from the old state and from values before the new state."""
    u = p["a"] * v + x @ p["w"]
    return u - 0.3 * spike(u - 0.2), jnp.tanh(u) @ p["o"] + v @ p["r"]


def encoded(p, h, x):
    """Drive every unit by the first matrix, through the second."""
    h = 0.8 * h + jnp.tanh(x @ p["e"] + p["b"]) @ p["w"]
    return h, h @ p["o"]


def copied(p, s, x):
    h = 0.5 * s["h"] + 0.2 * s["last"] + x @ p["w"]
    return {"h": h, "last": h}, h @ p["o"]


def shifted(p, s, x):
    h = 0.5 * s[0] + jnp.tanh(s[2]) + x @ p["w"]
    return [h, s[0], s[1]], h @ p["o"] + s[2] @ p["r"]


def reshaped(p, s, x):
    h = s.reshape(*x.shape[:-1], H) * p["a"] + x @ p["w"]
    return h.reshape(s.shape), h @ p["o"]


def tied(p, h, x):
    """Use one matrix twice, and its transpose for the output."""
    h = 0.5 * h + jnp.tanh(x @ p["w"]) + 0.1 * x**2 @ p["w"]
    return h, h @ p["w"].T @ p["o"]


def looped(p, h, x):
    drive = x @ p["w"]
    h = jax.lax.fori_loop(0, 3, lambda _, h: h + 0.3 * (jnp.tanh(drive) - p["a"] * h), h)
    return h, h @ p["o"]


def branched(p, h, x):
    drive = x @ p["w"]
    h = jax.lax.cond(x.sum() > 0, lambda h: 0.5 * h + drive, lambda h: p["a"] * h - drive, h)
    return h, h @ p["o"]


@jax.jit
def wrapped(p, h, x):
    cell = jax.checkpoint(jax.jit(lambda h, x: p["a"] * h + jax.nn.relu(x @ p["w"] + 0.3)))
    h = cell(h, x)
    return h, jax.jit(lambda h: h @ p["o"])(h)


def picked(p, h, x):
    """Pick the gates by indices in any order, and a unit's input from another position."""
    y = (x @ p["w"])[..., np.array([3, 1, 2, 0])]
    h = p["a"] * h + jnp.flip(y, -1)
    return h, h @ p["o"]


def heads(p, h, x):
    """Apply block matrices by einsum, a scalar gain, and a parameter on the left."""
    y = jnp.einsum("hij,...hi->...hj", p["w"], jnp.stack([x, -x], -2))
    z = jnp.moveaxis(p["v"] @ jnp.moveaxis(x, -1, 0), 0, -1)
    h = p["g"] * h + y.reshape(*x.shape[:-1], H) + z
    return h, h @ p["o"]


def frozen(p, h, x):
    """Take parameters that are not floats, and one that nothing uses."""
    h = 0.5 * h + (x @ p["w"]) * p["mask"]
    return h, h @ p["o"]


def convolved(p, h, x):
    kernel = p["k"].reshape(3, 1, 1)
    h = (
        0.5 * h
        + jax.lax.conv_general_dilated(
            jnp.tanh(x @ p["w"])[..., None],
            kernel,
            (1,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
        )[..., 0]
    )
    return h, h @ p["o"]


def kept(p, s, x):
    """Return one state unchanged, and a parameter as another state."""
    h = p["a"] * s[0] + x @ p["w"] + s[1] * s[2]
    return (h, s[1], jnp.broadcast_to(p["b"], h.shape)), h @ p["o"]


def within(p, h, x):
    """Apply a matrix in a loop."""
    h = jax.lax.fori_loop(0, 3, lambda _, h: 0.5 * h + x @ p["w"], h)
    return h, h @ p["o"]


def embedded(p, h, x):
    h = p["a"] * h + p["e"][(x[..., 0] > 0).astype(int)]
    return h, h @ p["o"]


def widths(p, h, x):
    """Close over the width of a surrogate, which only its derivative uses."""

    @jax.custom_vjp
    def spike(v, width):
        return (v > 0).astype(v.dtype)

    def back(kept, g):
        v, width = kept
        return g * jnp.exp(-width * v**2), g * jnp.sin(v)

    spike.defvjp(lambda v, width: (spike(v, width), (v, width)), back)
    h = 0.9 * h + x @ p["w"]
    h = h - 0.2 * spike(h, jnp.broadcast_to(p["b"], h.shape))
    return h, h @ p["o"]


def written(p, h, x):
    h = p["a"] * h + x @ p["w"]
    return h.at[..., 1].multiply(2.0).at[..., 0].set(h[..., 0] ** 2), h @ p["o"]


def factored(p, h, x):
    """Use low-rank, normalised and masked weights, and output a penalty."""
    w = p["w"] / jnp.linalg.norm(p["w"], axis=0) * np.tri(I, H)
    h = 0.5 * h + (x @ p["u"]) @ p["v"] + x @ w
    return h, {"y": h @ p["o"], "penalty": (p["w"] ** 2).sum()}


UNITS = {
    "leaky": (leaky, made(a=(H,), w=(I, H), b=(H,), o=(H, O), c=(O,)), 1),
    "gated": (gated, made(w=(I, 2 * H), b=(2 * H,), u=(2 * H,), o=(H, O)), 1),
    "lstm": (
        lstm,
        {"w": [array(I, H, seed=i) for i in range(4)], **made(u=(4, H), o=(H, O))},
        "ch",
    ),
    "lru": (lru, made(nu=(H,), theta=(H,), b0=(I, H), b1=(H, I), o=(2 * H, O)), 2),
    "lif": (functools.partial(lif, spike), made(a=(H,), w=(I, H), o=(H, O)), "vz"),
    "lif, jvp": (functools.partial(lif, soft_spike), made(a=(), w=(I, H), o=(H, O)), "vz"),
    "read beside": (read_beside, made(a=(H,), w=(I, H), o=(H, O), r=(H, O)), 1),
    "encoded": (encoded, made(e=(I, 5), b=(5,), w=(5, H), o=(H, O)), 1),
    "copied": (copied, made(w=(I, H), o=(H, O)), ("h", "last")),
    "shifted": (shifted, made(w=(I, H), o=(H, O), r=(H, O)), 3),
    "tied": (tied, made(w=(I, H), o=(I, O)), 1),
    "looped": (looped, made(w=(I, H), a=(H,), o=(H, O)), 1),
    "branched": (branched, made(w=(I, H), a=(H,), o=(H, O)), 1),
    "wrapped": (wrapped, made(w=(I, H), a=(H,), o=(H, O)), 1),
    "picked": (picked, made(w=(I, H), a=(H,), o=(H, O)), 1),
    "heads": (heads, made(w=(2, I, H // 2), v=(H, I), g=(), o=(H, O)), 1),
    "kept": (kept, made(a=(H,), w=(I, H), b=(H,), o=(H, O)), -3),
    "within": (within, made(w=(I, H), o=(H, O)), 1),
    "embedded": (embedded, made(a=(H,), e=(2, H), o=(H, O)), 1),
    "widths": (widths, made(w=(I, H), b=(H,), o=(H, O)), 1),
    "written": (written, made(a=(H,), w=(I, H), o=(H, O)), 1),
    "factored": (factored, made(w=(I, H), u=(I, 2), v=(2, H), o=(H, O)), 1),
    "frozen": (
        frozen,
        made(w=(I, H), o=(H, O), unused=(3,)) | {"mask": np.array([True, False, True, True])},
        1,
    ),
}


def state_of(kind, *batch):
    keys = range(abs(kind)) if isinstance(kind, int) else kind
    arrays = [array(*batch, H, seed=7 + i) for i, _ in enumerate(keys)]
    if isinstance(kind, int):
        return arrays[0] if kind == 1 else arrays if kind == 3 else tuple(arrays)
    return dict(zip(keys, arrays, strict=True))


def data(*batch):
    return array(T, *batch, I, seed=20), array(T, *batch, O, seed=21)


def is_float(tree):
    return jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), tree)


def truth(step, params, state, xs, ys):
    """Compute gradients by BPTT, with zeros for parameters that are not floats."""
    some = {k: v for k, v in params.items() if all(jax.tree.leaves(is_float(v)))}
    rest = {k: v for k, v in params.items() if k not in some}
    value, grads = bptt(lambda p, s, x: step(p | rest, s, x), some, state, xs, ys)
    return value, grads | jax.tree.map(jnp.zeros_like, rest)


LIKE_OTHERS = ("lif, jvp", "shifted", "wrapped", "picked", "kept", "within", "widths", "written")


@pytest.mark.once
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.many] * (name in LIKE_OTHERS)) for name in UNITS]
)
def test_exact_where_units_act_on_themselves(name):
    batch = () if name in ("lru", "heads", "copied", "widths") else (B,)
    step, params, kind = UNITS[name]
    state, (xs, ys) = state_of(kind, *batch), data(*batch)
    want = truth(step, params, state, xs, ys)
    close(learn(online.d_rtrl(step, loss), params, state, xs, ys), want)


@pytest.mark.many
@pytest.mark.parametrize("name", UNITS)
def test_e_prop_is_exact_there_too(name):
    step, params, kind = UNITS[name]
    state, (xs, ys) = state_of(kind, B), data(B)
    want = truth(step, params, state, xs, ys)
    close(learn(online.e_prop(step, loss), params, state, xs, ys), want)


@pytest.mark.parametrize("name", ["gated", "lstm", "encoded", "copied", "shifted", "lif"])
def test_exact_from_the_gradient_by_old_states(name):
    step, params, kind = UNITS[name]
    state, (xs, ys) = state_of(kind, B), data(B)
    learner = online.d_rtrl(step, loss, signal="old")
    close(learn(learner, params, state, xs, ys), bptt(step, params, state, xs, ys))


def test_a_convolution_over_units_is_traced_in_full():
    params, state, (xs, ys) = made(k=(3,), w=(I, H), o=(H, O)), state_of(1, B), data(B)
    want = bptt(convolved, params, state, xs, ys)
    close(learn(online.d_rtrl(convolved, loss), params, state, xs, ys), want)


def test_a_state_in_another_shape():
    params, (xs, ys) = made(a=(H,), w=(I, H), o=(H, O)), data(B)
    state = array(B * H)
    want = bptt(reshaped, params, state, xs, ys)
    close(learn(online.d_rtrl(reshaped, loss), params, state, xs, ys), want)
