"""Gradients of values inside a program, by JAX and by differences alone.

A program under test takes its mark function, `program(mark)`, and calls `mark(x, name)` instead of
`tapax.sow`. The reference passes a function that adds to `x`.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np


def unmarked(x, name):
    """Mark nothing."""
    return x


def changed(changes):
    """Make a mark that applies `changes[name]` where tapax would edit that site."""
    return lambda x, name: changes[name](x) if name in changes else x


def gradients(loss, like):
    """Differentiate `loss(mark)` by zeros added to the calls in `like`, a dict of arrays by name.

    `h@1` is the second call of `h` in a program that JAX traces once.
    """

    def shifted(zeros):
        calls = Counter()

        def mark(x, name):
            path = f"{name}@{calls[name]}" if calls[name] else name
            calls[name] += 1
            return x + zeros[path] if path in zeros else x

        return loss(mark)

    return jax.grad(shifted)({name: jnp.zeros_like(x) for name, x in like.items()})


def differences(fn, x, step=1e-5):
    """Take the central differences of `fn`, a function of one array to a number.

    Call it under `jax.enable_x64(True)`.
    """
    x = np.asarray(x, np.float64)
    out = np.zeros(x.size)
    for i in range(x.size):
        shift = step * np.eye(1, x.size, i).reshape(x.shape)
        out[i] = (float(fn(x + shift)) - float(fn(x - shift))) / (2 * step)
    return out.reshape(x.shape)
