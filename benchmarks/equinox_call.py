"""Calls of a captured `eqx.filter_jit`, over plain calls: a model of 4,000 arrays in and out.

NNX is imported too: its adapter then looks for objects of NNX among the arguments of every call.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.nnx  # noqa: F401
import jax
import jax.numpy as jnp

import tapax
from benchmarks.measure import Result, race

LEAVES = 4000


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array


class Net(eqx.Module):
    layers: list[Layer]

    def __call__(self, x: jax.Array) -> jax.Array:
        return tapax.sow(x * self.layers[0].weight + self.layers[0].bias, "h")


def step(net: Net, x: jax.Array) -> Any:
    return jax.tree.map(jnp.negative, net), net(x)


def calling(rounds: int) -> list[Result]:
    net = Net([Layer(jnp.ones(2), jnp.ones(2)) for _ in range(LEAVES // 2)])
    x = jnp.ones(2)
    jitted = eqx.filter_jit(step)
    entrants = {"captured": tapax.capture(jitted), "jitted": jitted}
    times = race({k: lambda f=f: f(net, x) for k, f in entrants.items()}, rounds)
    topic = f"Equinox, calling with {LEAVES} leaves"
    return [Result.timed(topic, "over filter_jit", times, "captured", "jitted", bar=1.1)]
