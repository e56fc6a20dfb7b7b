"""Edits, gradients and prefixes of a GPT at one site, over hand-written equivalents."""

from __future__ import annotations

from typing import Any

import jax

import tapax
from benchmarks import gpt
from benchmarks.gpt import Config
from benchmarks.measure import Result, build, memory, race, require_equal
from benchmarks.step import tolerance


def edited(cfg: Config, rounds: int) -> list[Result]:
    """Time a forward pass with one changed value, over the plain forward pass."""
    args = cfg.arguments()
    middle = cfg.layers // 2
    site = f"block{middle}/out"
    functions = {
        "plain": gpt.unrolled(cfg, gpt.Bare()),
        "edited": tapax.edit(gpt.unrolled(cfg, tapax), values={site: _scaled}),
        "hand": _by_hand(cfg, middle),
    }
    built = {name: build(f, *args) for name, f in functions.items()}
    require_equal("edited", built["edited"](*args), built["hand"](*args), tolerance(cfg))
    times = race({name: lambda f=f: f(*args) for name, f in built.items()}, rounds)
    topic = f"{cfg.layers} blocks, one edit"
    return [
        Result.timed(topic, "time over plain", times, "edited", "plain", bar=1.02),
        Result.timed(topic, "time over by hand", times, "edited", "hand"),
    ]


def gradient(cfg: Config, rounds: int) -> list[Result]:
    """Measure the gradient with respect to one value, over `jax.vjp` of a hand-split function."""
    args = cfg.arguments()
    middle = cfg.layers // 2

    def hand(params: gpt.Params, tokens: jax.Array) -> Any:
        value, back = jax.vjp(
            lambda x: _after(cfg, middle, params, x, tokens), _before(cfg, middle, params, tokens)
        )
        return value, back(jax.numpy.ones_like(value))[0]

    loss, site = gpt.unrolled(cfg, tapax), f"block{middle}/out"

    def perturbed(params: gpt.Params, tokens: jax.Array) -> Any:
        zeros = tapax.perturbations(loss, site)(params, tokens)
        return jax.value_and_grad(tapax.perturbed(loss, site))(zeros, params, tokens)

    functions = {"grad": tapax.value_and_grad(loss, site), "hand": hand, "perturbed": perturbed}
    built = {name: build(f, *args) for name, f in functions.items()}
    expected = built["hand"](*args)
    for name in ("grad", "perturbed"):
        value, grads = built[name](*args)
        require_equal(name, (value, grads[site]), expected, tolerance(cfg))
    times = race({name: lambda f=f: f(*args) for name, f in built.items()}, rounds)
    mib = {name: memory(f) for name, f in built.items()}
    topic = f"{cfg.layers} blocks, gradient by one value"
    return [
        Result.timed(topic, "time over jax.vjp by hand", times, "grad", "hand", bar=1.03),
        Result(topic, "memory over by hand", mib["grad"], mib["hand"], "MiB", bar=1.0),
        Result(
            topic, "perturbed: memory over by hand", mib["perturbed"], mib["hand"], "MiB", bar=1.0
        ),
    ]


def prefix(cfg: Config, rounds: int) -> list[Result]:
    """Time the function up to the end of the first quarter of its blocks, over the whole."""
    args = cfg.arguments()
    loss = gpt.unrolled(cfg, tapax)
    last = max(cfg.layers // 4 - 1, 0)
    built = {
        "plain": build(gpt.unrolled(cfg, gpt.Bare()), *args),
        "prefix": build(tapax.prefix(loss, f"block{last}/out"), *args),
    }
    expected = _before(cfg, last, *args)
    require_equal("prefix", built["prefix"](*args), expected, tolerance(cfg))
    times = race({name: lambda f=f: f(*args) for name, f in built.items()}, rounds)
    topic = f"prefix, {last + 1} of {cfg.layers} blocks"
    return [Result.timed(topic, "time over plain", times, "prefix", "plain", bar=0.30)]


def _scaled(x: jax.Array) -> jax.Array:
    return x * 0.9


def _before(cfg: Config, last: int, params: gpt.Params, tokens: jax.Array) -> jax.Array:
    """Compute the stream after the block `last`."""
    x = gpt.embed(params, tokens)
    for p in params["blocks"][: last + 1]:
        x = gpt.block(p, x, cfg.heads, gpt.Bare())
    return x


def _after(
    cfg: Config, last: int, params: gpt.Params, x: jax.Array, tokens: jax.Array
) -> jax.Array:
    for p in params["blocks"][last + 1 :]:
        x = gpt.block(p, x, cfg.heads, gpt.Bare())
    return gpt.head(params, x, tokens)


def _by_hand(cfg: Config, last: int) -> Any:
    def loss(params: gpt.Params, tokens: jax.Array) -> jax.Array:
        return _after(cfg, last, params, _scaled(_before(cfg, last, params, tokens)), tokens)

    return loss
