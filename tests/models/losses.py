"""Losses whose backward passes keep values in every way that JAX offers."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import tapax

F = jnp.float32


def arrays(*shapes, dtype=F):
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def matmul_chain(w1, w2, x):
    h = tapax.sow(jnp.tanh(x @ w1), "h")
    return jnp.sum(tapax.sow(jnp.sin(h @ w2), "out") ** 2)


def attention(wq, wk, wv, x):
    q, k, v = tapax.sow(x @ wq, "q"), x @ wk, x @ wv
    scores = q @ k.T / jnp.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -1e9)
    weights = tapax.sow(jax.nn.softmax(scores), "weights")
    return jnp.mean((weights @ v) ** 2)


def layer(h, w):
    with tapax.scope("layer"):
        return tapax.sow(jnp.tanh(h @ w), "h"), None


def scanned(ws, x):
    h, _ = jax.lax.scan(layer, x, ws)
    return jnp.sum(h**2)


def scanned_remat(ws, x):
    h, _ = jax.lax.scan(jax.checkpoint(layer), x, ws)
    return jnp.sum(h**2)


def scanned_policy(ws, x):
    body = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
    h, _ = jax.lax.scan(body, x, ws)
    return jnp.sum(h**2)


def branched(w, x):
    def one(h):
        return tapax.sow(jnp.sin(h) * jnp.exp(h), "one")

    def other(h):
        return tapax.sow(jnp.tanh(h), "other")

    return jnp.sum(jax.lax.cond(x[0, 0] > 0, one, other, x @ w) ** 2)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(
    lambda x: (clipped(x), (jnp.abs(x) < 1, jnp.cos(x))), lambda r, g: (g * r[0] * r[1],)
)


def custom_backward(w, x):
    return jnp.sum(tapax.sow(clipped(x @ w), "clipped") ** 2)


@jax.custom_jvp
def smooth(x):
    return jnp.log1p(jnp.exp(x))


smooth.defjvp(lambda p, t: (smooth(*p), jax.nn.sigmoid(*p) * t[0]))


def custom_forward(w, x):
    return jnp.sum(tapax.sow(smooth(x @ w), "smooth") ** 2)


@jax.jit
def block(w, h):
    return tapax.sow(jax.nn.gelu(h @ w), "block")


def jitted(w, x):
    return jnp.sum(block(w, block(w, x)) ** 2)


def mapped(w, x):
    return jnp.sum(jax.vmap(lambda row: tapax.sow(jnp.tanh(row @ w), "row"))(x) ** 2)


def chosen(w, x):
    h = x @ w
    return jnp.sum(jnp.where(h > 0, jnp.log1p(jnp.abs(h)), jnp.exp(h)))


def normed(w, scale, x):
    h = x @ w
    mean, var = h.mean(-1, keepdims=True), h.var(-1, keepdims=True)
    return jnp.sum(tapax.sow((h - mean) * jax.lax.rsqrt(var + 1e-6) * scale, "norm") ** 2)


def embedded(table, w, tokens):
    return jnp.sum(jnp.tanh(tapax.sow(table[tokens], "embedding") @ w))


def convolved(kernel, x):
    out = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")
    return jnp.sum(tapax.sow(jax.nn.relu(out), "conv") ** 2)


def nested_remat(w1, w2, x):
    @jax.checkpoint
    def inner(h):
        return jnp.sin(jnp.cos(h @ w2))

    @jax.checkpoint
    def outer(h):
        return jnp.exp(tapax.sow(inner(jnp.tanh(h @ w1)), "inner"))

    return jnp.sum(outer(x))


def in_bfloat16(w, x):
    h = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    return jnp.mean(tapax.sow(h, "h").astype(F) ** 2)


def cross_entropy(w, x, labels):
    log_p = jax.nn.log_softmax(tapax.sow(x @ w, "logits"))
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


def shared(w, x):
    h = tapax.sow(jnp.exp(x @ w), "h")
    return jnp.sum(h * jnp.sin(h)) + jnp.sum(h * h)


def dropped(w, x, key):
    h = jnp.tanh(x @ w)
    keep = jax.random.bernoulli(key, 0.5, h.shape)
    return jnp.sum(tapax.sow(jnp.where(keep, h / 0.5, 0), "dropout") ** 2)


def named(w, x):
    h = checkpoint_name(jnp.sin(x @ w), "ffn")
    return jnp.sum(jnp.exp(h))


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("ffn"))
def named_remat(w, x):
    return named(w, x)


def looped(w, x):
    """Run a loop with a known trip count, and a loop before the differentiated part."""
    start = jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, jnp.int32(0))
    h = jax.lax.fori_loop(0, 4, lambda i, h: tapax.sow(jnp.tanh(h @ w), "h"), x)
    return jnp.sum(h * start)


def constant(w, x):
    return jnp.sum(jnp.arange(6.0) * jnp.sin(x @ w) * 2.0)


W, X = (6, 6), (8, 6)
STACK = (5, 6, 6)
INTS = arrays((8,), dtype=jnp.int32)
KEY = (jax.eval_shape(jax.random.key, 0),)

LOSSES = {
    matmul_chain: arrays(W, W, X),
    attention: arrays(W, W, W, X),
    scanned: arrays(STACK, X),
    scanned_remat: arrays(STACK, X),
    scanned_policy: arrays(STACK, X),
    branched: arrays(W, X),
    custom_backward: arrays(W, X),
    custom_forward: arrays(W, X),
    jitted: arrays(W, X),
    jax.jit(matmul_chain): arrays(W, W, X),
    mapped: arrays(W, X),
    chosen: arrays(W, X),
    normed: arrays(W, (6,), X),
    embedded: arrays((10, 6), W) + INTS,
    convolved: arrays((3, 2, 3, 3), (2, 2, 5, 5)),
    nested_remat: arrays(W, W, X),
    in_bfloat16: arrays(W, X),
    cross_entropy: arrays(W, X) + INTS,
    shared: arrays(W, X),
    dropped: arrays(W, X) + KEY,
    named: arrays(W, X),
    named_remat: arrays(W, X),
    looped: arrays(W, X),
    constant: arrays(W, X),
}
"""The types of the arguments of every loss."""
