"""Calls of a captured jitted function, over calls of a jitted function with the same outputs.

Small: almost no computation, so that the call takes all of the time. Medium: enough computation
that the overhead of the call should not be noticeable. Many leaves: a dict of 4,000 arrays is the
argument and the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tapax
from benchmarks import hand
from benchmarks.measure import Result, race, require_equal

SITES = 8


def functions(width: int):
    """Make `(marked, by hand, arguments)`: a small tanh network and its gradient, eight sites."""
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(0, width**-0.5, (SITES, width, width)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(width, width)), jnp.float32)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        for i in range(SITES):
            x = tapax.sow(jnp.tanh(x @ weights[i]), f"layer{i}")
        return (x * x).mean()

    def loss_by_hand(weights: jax.Array, slots: dict[str, jax.Array], x: jax.Array):
        values = {}
        for i in range(SITES):
            values[f"layer{i}"] = jnp.tanh(x @ weights[i])
            x = hand.port(values[f"layer{i}"], slots[f"layer{i}"])
        return (x * x).mean(), values

    def by_hand(weights: jax.Array, x: jax.Array):
        slots = {f"layer{i}": jnp.zeros_like(x) for i in range(SITES)}
        derive = jax.value_and_grad(loss_by_hand, argnums=(0, 1), has_aux=True)
        (value, values), (grads, site_grads) = derive(weights, slots, x)
        return (value, grads), values, site_grads

    return jax.jit(jax.value_and_grad(loss)), jax.jit(by_hand), (weights, x)


def calling(what: str, width: int, rounds: int, calls: int) -> Result:
    marked, by_hand, args = functions(width)
    captured = tapax.capture(marked)
    out, taps = captured(*args)
    found = (out, dict(taps.values), dict(taps.grads))
    require_equal("captured", found, by_hand(*args), 1e-5)
    entrants = {"captured": lambda: captured(*args), "by hand": lambda: by_hand(*args)}
    times = race(entrants, rounds, calls=calls)
    return Result.timed("calling", f"{what}, over jitted", times, "captured", "by hand", bar=1.1)


LEAVES = 4000


def many_leaves(rounds: int) -> list[Result]:
    params = {f"layer{i}": {"w": jnp.ones(2), "b": jnp.ones(2)} for i in range(LEAVES // 2)}
    x = jnp.ones(2)

    def step(params: dict[str, dict[str, jax.Array]], x: jax.Array):
        return jax.tree.map(jnp.negative, params), tapax.sow(2 * x, "h")

    jitted = jax.jit(step)
    entrants = {"captured": tapax.capture(jitted), "traced": tapax.capture(step), "jitted": jitted}
    times = race({k: lambda f=f: f(params, x) for k, f in entrants.items()}, rounds)
    topic = f"calling with {LEAVES} leaves"
    return [
        Result.timed(topic, "jitted, over jitted", times, "captured", "jitted", bar=1.1),
        Result.timed(topic, "not jitted, over jitted", times, "traced", "jitted"),
    ]


def all_sizes(rounds: int) -> list[Result]:
    return [
        calling("small", 4, rounds, calls=200),
        calling("medium", 192, rounds, calls=5),
        *many_leaves(rounds),
    ]
