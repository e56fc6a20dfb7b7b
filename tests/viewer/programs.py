"""A small transformer, captured and monitored for the tests of the page."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tapax

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 2, 8, 2, 6, 2
LETTERS = "abc <\n"


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        return x + jnp.tanh(self.mlp(x))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(len(LETTERS), WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, len(LETTERS), rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss(model):
        logits = model(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def _start():
    model = GPT(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)


def _tokens(seed=0):
    return np.random.default_rng(seed).integers(len(LETTERS), size=(BATCH, LENGTH))


def capture_step():
    """Return the taps of a step with all values, gradients, attention weights; and the tokens."""
    tokens = _tokens()
    _, taps = tapax.capture(train_step, values=["**", "**:weights"])(*_start(), jnp.asarray(tokens))
    return taps, [[LETTERS[i] for i in line] for line in tokens]


def monitor_run(path, steps=12):
    """Watch every second step of a short run, which sets off alerts."""
    model, optimizer = _start()
    bins = tapax.reduce.histogram(log2=(-10, 4))
    watched = {"**": [tapax.reduce.rms, tapax.reduce.mean], "GPT/blocks/*": bins}
    with tapax.monitor(
        train_step,
        every=2,
        values=watched,
        grads=watched,
        to=path,
        alerts=[tapax.alert.above("**/mlp", grad_norm=1e-6)],
    ) as step:
        for i in range(steps):
            step(model, optimizer, jnp.asarray(_tokens(i)))
