"""Hidden states over a whole sequence: two GRU layers, a hundred steps, one backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tapax
from benchmarks.measure import Result, build, memory, race, size

LENGTH, BATCH, WIDTH = 100, 32, 256
Params = dict[str, dict[str, jax.Array]]


def _layer(rng: np.random.Generator) -> dict[str, jax.Array]:
    def weights(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(rows, columns)) / np.sqrt(rows), jnp.float32)

    return {"w": weights(WIDTH, 3 * WIDTH), "u": weights(WIDTH, 3 * WIDTH), "b": weights(1, WIDTH)}


def _gru(p: dict[str, jax.Array], h: jax.Array, x: jax.Array) -> jax.Array:
    xz, xr, xn = jnp.split(x @ p["w"], 3, axis=-1)
    hz, hr, hn = jnp.split(h @ p["u"], 3, axis=-1)
    z, r = jax.nn.sigmoid(xz + hz), jax.nn.sigmoid(xr + hr)
    return (1 - z) * jnp.tanh(xn + r * hn + p["b"]) + z * h


def unrolled(rounds: int) -> list[Result]:
    """Compare the gradients of parameters and all hidden states with those of parameters alone."""
    rng = np.random.default_rng(0)
    params = {"one": _layer(rng), "two": _layer(rng)}
    xs = jnp.asarray(rng.normal(size=(LENGTH, BATCH, WIDTH)), jnp.float32)

    def loss(params: Params, xs: jax.Array) -> jax.Array:
        def step(
            state: dict[str, jax.Array], x: jax.Array
        ) -> tuple[dict[str, jax.Array], jax.Array]:
            one = _gru(params["one"], state["one"], x)
            two = _gru(params["two"], state["two"], one)
            return {"one": one, "two": two}, jnp.mean(two**2)

        zeros = jnp.zeros((BATCH, WIDTH), jnp.float32)
        return jnp.sum(
            jax.lax.scan(tapax.hidden.mark_states(step), {"one": zeros, "two": zeros}, xs)[1]
        )

    plain = build(jax.grad(loss), params, xs)
    captured = build(tapax.capture(jax.grad(loss), values=None, grads=("one", "two")), params, xs)
    times = race(
        {"captured": lambda: captured(params, xs), "plain": lambda: plain(params, xs)}, rounds
    )
    _, taps = captured(params, xs)
    return [
        Result.timed("hidden", "dL/dh of 100 steps: run time", times, "captured", "plain", 1.05),
        Result(
            "hidden", "the same: memory over plain and the result",
            memory(captured), memory(plain) + size(taps.grads), "MiB", 1.001,
        ),
    ]  # fmt: skip
