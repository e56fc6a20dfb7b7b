"""An ensemble of four members in one model, over four models in one compiled function.

The four models run in a loop, or mapped over a stack, whichever is faster. The bar is for a few
rows, where reading the weights takes most of the time, as in the paper. Two further cases have no
bar: one row, which a CPU multiplies in a faster way than the four rows of an ensemble; and many
rows, where arithmetic takes most of the time, and an ensemble needs as much of it as four models.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.measure import Result, fastest, flat, race, require_equal
from tapax import nn

MEMBERS = 4


class MLP(nnx.Module):
    def __init__(self, width: int, depth: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)


def separate(rounds: int) -> list[Result]:
    """Compare an ensemble of four members with four models."""
    wide = 4096 if jax.default_backend() == "cpu" else 16384
    cases = [(2, wide, 2, 1 / 3), (1, wide, 2, None), (256, 512, 4, None)]
    return [result for case in cases for result in _separate(rounds, *case)]


def _separate(rounds: int, rows: int, width: int, depth: int, bar: float | None) -> list[Result]:
    models = [MLP(width, depth, nnx.Rngs(i)) for i in range(MEMBERS)]
    ensemble = nn.batch_ensemble(models[0], MEMBERS, rngs=0)
    graphdef, state = nnx.split(ensemble)
    plain, _ = nnx.split(models[0])
    states = [nnx.state(model) for model in models]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
    x = jax.random.normal(jax.random.key(0), (rows, width))

    def together(state: Any, x: jax.Array) -> jax.Array:
        return nn.unfold(nnx.merge(graphdef, state)(nn.tile(x, MEMBERS)), MEMBERS)

    def looped(states: Any, x: jax.Array) -> jax.Array:
        return jnp.stack([nnx.merge(plain, state)(x) for state in states])

    def mapped(stacked: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(lambda state: nnx.merge(plain, state)(x))(stacked)

    programs = {"ensemble": (together, state), "loop": (looped, states), "map": (mapped, stacked)}
    runs = {name: flat(f, given, x) for name, (f, given) in programs.items()}
    # A GPU does not compute products in full precision.
    tolerance = 1e-5 if jax.default_backend() == "cpu" else 2e-3
    require_equal("models", runs["loop"](), runs["map"](), tolerance)
    # One member must equal the plain model with the weights of that member.
    alone = nnx.clone(models[0])
    for own, layer in zip(
        [*alone.layers, alone.head], [*ensemble.layers, ensemble.head], strict=True
    ):
        own.kernel[...] = layer.kernel[...] * layer.r[1][:, None] * layer.s[1]
        own.bias[...] = layer.bias[1]
    require_equal("member", runs["ensemble"]()[1], alone(x), tolerance)
    times = race(runs, rounds, calls=5)
    best = fastest({name: times[name] for name in ("loop", "map")})
    topic = f"{MEMBERS} members of {depth} x {width}, {rows} rows"
    counts = [_count(state) / 1e6, _count(states) / 1e6]
    return [
        Result.timed(topic, f"time over {MEMBERS} models", times, "ensemble", best, bar=bar),
        Result(topic, f"parameters over {MEMBERS} models", *counts, "M", bar=bar),
    ]


def _count(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))
