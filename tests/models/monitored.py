"""Train steps for the tests of monitors, and a function that records them."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import tapax
from tapax.monitoring._log import Log
from tapax.monitoring._monitor import monitor

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (6, 4), jnp.float32)


def batch(i):
    return X * (1 + i % 7)


def watched(step, *calls, **options):
    """Monitor every call; return the log and the alerts."""
    log = Log()
    with monitor(step, every=1, to=log, **options) as m:
        for args in calls:
            m(*args)
    return log, m.alerts


@functools.partial(jax.jit, donate_argnums=(0, 1))
def scanned(w, momentum, x):
    """Train layers in a scan by hand, with donated parameters and momentum."""

    def loss(w):
        h, _ = lax.scan(lambda h, w: (tapax.sow(jnp.tanh(h @ w), "h"), None), x, w)
        return jnp.mean((tapax.sow(h, "out") - 1) ** 2)

    momentum = 0.9 * momentum + jax.grad(loss)(w)
    return w - 0.05 * momentum, momentum


W = 0.5 * jax.random.normal(KEY, (3, 4, 4), jnp.float32)


@jax.jit
def layers(x, scale):
    def loss(x):
        a = tapax.sow(jax.nn.relu(x), "Net/a")
        b = tapax.sow(scale * a, "Net/b")
        return jnp.sum(tapax.sow(jnp.log(b), "Net/c"))

    return jax.grad(loss)(x)


ONES = jnp.ones((2, 4), jnp.float32)
