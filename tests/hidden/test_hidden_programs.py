"""Random steps, wrapped at random, against eager steps perturbed by hand.

A step computes each state from the previous one and an output from each, by random programs; the
states may have another shape. The oracle adds a perturbation where the step computes a state.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapax.hidden import add_hidden_perturbation

pytestmark = pytest.mark.once

N = 3
SHAPES = [
    (lambda h: h, lambda s: s),
    (lambda h: h.reshape(1, N), lambda s: s.reshape(N)),
    (jnp.copy, lambda s: s),
    (lambda h: h[:, None].T, lambda s: s[0]),
]
UNARY = [
    jnp.tanh, jnp.sin, jax.nn.sigmoid, jax.nn.silu, lambda x: x * 0.5,
    lambda x: x.reshape(N, 1)[:, 0], jnp.flip, lambda x: x - x.mean(),
]  # fmt: skip


def function(rng, depth):
    """Draw a random function of two arrays."""
    simple = ["unary", "binary", "matrix"]
    bodies = ["scan", "loop", "cond", "jit", "remat"]
    kind = rng.choice(simple + bodies if depth else simple)
    i = rng.randrange(2)
    if kind == "unary":
        f = rng.choice(UNARY)
        return lambda a, b: f((a, b)[i])
    if kind == "binary":
        f = rng.choice([jnp.add, jnp.multiply, jnp.subtract])
        return lambda a, b: f(jnp.sin(a), b)
    if kind == "matrix":
        w = np.random.default_rng(rng.randrange(10**6)).normal(size=(N, N)) * 0.4
        return lambda a, b: jnp.tanh(w @ (a, b)[i] + (b, a)[i])
    f, g = function(rng, depth - 1), function(rng, depth - 1)
    if kind == "scan":
        length = rng.randrange(1, 5)
        step = lambda b: lambda c, _: (0.5 * f(c, b), None)
        return lambda a, b: lax.scan(step(b), a, None, length=length)[0]
    if kind == "loop":
        return lambda a, b: lax.fori_loop(0, 2, lambda _, c: 0.5 * f(c, b), a)
    if kind == "cond":
        bound = rng.uniform(-1, 1)
        return lambda a, b: lax.cond(jnp.sum(a) > bound, f, g, a, b)
    wrap = jax.jit if kind == "jit" else jax.checkpoint
    return wrap(lambda a, b: f(g(a, b), b))


def once_in_a_scan(step):
    def wrapped(state, x):
        state, outs = lax.scan(step, state, x[None])
        return state, jax.tree.map(lambda v: v[0], outs)

    return wrapped


WRAPS = [
    lambda step: step,
    jax.jit,
    jax.checkpoint,
    lambda step: jax.jit(lambda s, x: jax.jit(step)(s, x)),
    lambda step: jax.checkpoint(jax.jit(step)),
    lambda step: lambda s, x: lax.cond(jnp.sum(x) < 100, step, step, s, x),
    once_in_a_scan,
]


@pytest.mark.parametrize(
    "part", [*range(3), *(pytest.param(i, marks=pytest.mark.many) for i in range(3, 40))]
)
def test_random_steps_agree_with_perturbation_by_hand(part):
    with jax.enable_x64(True):
        for seed in range(6 * part, 6 * part + 6):
            check(random.Random(seed), np.random.default_rng(seed))


def check(rng, numbers):
    count = rng.randrange(1, 4)
    makes = [function(rng, rng.randrange(3)) for _ in range(count)]
    reads = [function(rng, rng.randrange(2)) for _ in range(count)]
    shapes = [rng.choice(SHAPES) for _ in range(count)]
    chained = rng.random() < 0.5

    def run(state, x, added):
        new, outs, before = {}, [], x
        for i, (make, read, (there, back)) in enumerate(zip(makes, reads, shapes, strict=True)):
            # A different value for each state.
            h = make(back(state[str(i)]), before) * 1.0 + 0.0 * x + added(i, back)
            new[str(i)] = there(h)
            outs.append(read(h, x))
            before = jnp.tanh(h) + x if chained else x
        return new, outs

    x = jnp.asarray(numbers.normal(size=N))
    state = {str(i): shapes[i][0](jnp.asarray(numbers.normal(size=N))) for i in range(count)}
    added = {k: jnp.asarray(0.3 * numbers.normal(size=v.shape)) for k, v in state.items()}
    by_hand = lambda p: run(state, x, lambda i, back: back(p[str(i)]))
    step = rng.choice(WRAPS)(lambda state, x: run(state, x, lambda i, back: 0.0))
    p = add_hidden_perturbation(step, state, x)
    ours = lambda q: p(q, state, x)
    total = lambda f: lambda q: sum(jnp.sum(jnp.sin(v)) for v in jax.tree.leaves(f(q)))
    for a, b in (
        (ours(added), by_hand(added)),
        (jax.grad(total(f))(added) for f in (ours, by_hand)),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), a, b)
