"""The cost of observing modules: an eager call of a model, and the tracing of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import tapax
from benchmarks.flax_gpt import GPT, Kinds
from benchmarks.gpt import Config
from benchmarks.measure import Result, race, require_equal
from benchmarks.nnx_step import plain_step
from tapax._frameworks import registry


class Net(nnx.Module):
    """A model of many small layers."""

    def __init__(self, layers: int, width: int) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def eager(layers: int, rounds: int) -> list[Result]:
    """Compare a captured model, which is compiled, with the plain call, operation by operation."""
    model, x = Net(layers, 8), jnp.ones((4, 8))
    captured = tapax.capture(model)
    out, taps = captured(x)
    assert len(taps.values) == layers + 1
    require_equal("captured", out, model(x), 1e-4)
    entrants = {
        "captured": lambda: captured(x),
        "captured anew": lambda: tapax.capture(model)(x),
        "plain": lambda: model(x),
    }
    times = race(entrants, rounds)
    topic = f"eager, {layers} layers"
    return [
        Result.timed(topic, "second call, over plain", times, "captured", "plain", bar=1.0),
        Result.timed(
            topic, "tapax.capture(model)(x), over plain", times, "captured anew", "plain", bar=1.0
        ),
    ]


def mark_by_hand(module: Any, run: Callable[[], Any]) -> Any:
    with tapax.scope(module.label):
        return tapax.sow(run(), "out")


def tracing(blocks: int, rounds: int) -> list[Result]:
    """Time tracing with adapters, over tracing marks in every module without any adapter."""
    cfg = Config(layers=blocks, width=16, length=16, batch=1, vocab=16)
    kinds = Kinds(mark_by_hand)
    models = {"adapters": GPT(cfg, Kinds()), "by hand": kinds(GPT)(cfg, kinds)}
    module: Any
    for path, module in nnx.iter_modules(models["by hand"]):
        own = path[-2:] if path and isinstance(path[-1], int) else path[-1:]
        module.label = "/".join(map(str, own)) or "GPT"
    _, tokens = cfg.arguments()

    def trace(name: str) -> tapax.SiteTable:
        model = models[name]
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        unseen = mock.patch.object(registry, "observe_calls", nullcontext)
        with unseen if name == "by hand" else nullcontext():
            # Make a new function each time, for which all caches are empty.
            step: Any = nnx.jit(functools.partial(plain_step))
            return tapax.sites(step)(model, optimizer, tokens)

    names = [site.removesuffix("/out") for site in trace("by hand").names]
    assert sorted(names) == sorted(trace("adapters").names)
    entrants = {name: lambda name=name: trace(name).names for name in models}
    times = race(entrants, rounds, warmup=1, before=jax.clear_caches)
    topic = f"tracing NNX, {blocks} blocks"
    measure = "adapters, over marks by hand"
    return [Result.timed(topic, measure, times, "adapters", "by hand", bar=1.2)]
