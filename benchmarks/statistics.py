"""Statistics of the value and gradient of every layer, over the plain train step.

Here the blocks of `gpt` have a site for each layer: both norms, the projections, and the stream.
The benchmark measures run time and memory for `rms`, for a log2 histogram of 28 bins, and for both
with `minmax` and `nonfinite`. `first_calls` traces and compiles the step with unrolled layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tapax
from benchmarks import gpt
from benchmarks.gpt import Config, Marks, Params
from benchmarks.measure import Result, build, memory, race

R = tapax.reduce
HISTOGRAM = R.histogram(log2=(-14, 12))
STATISTICS = {
    "rms": R.rms,
    "histogram": HISTOGRAM,
    "four": [R.rms, R.minmax, HISTOGRAM, R.nonfinite],
}
Loss = Callable[[Params, jax.Array], jax.Array]


def block(p: Params, x: jax.Array, heads: int, marks: Marks) -> jax.Array:
    batch, length, width = x.shape
    qkv = marks.sow(marks.sow(gpt.norm(x), "norm1") @ p["qkv"], "qkv")
    q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, width // heads), (2, 3), (0, 2))
    scores = (q @ k.mT).astype(jnp.float32) * (width // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = (jax.nn.softmax(scores).astype(x.dtype) @ v).swapaxes(1, 2).reshape(x.shape)
    x = x + marks.sow(mixed @ p["proj"], "attn")
    up = marks.sow(marks.sow(gpt.norm(x), "norm2") @ p["up"], "up")
    return marks.sow(x + marks.sow(jax.nn.gelu(up) @ p["down"], "mlp"), "out")


def scanned(cfg: Config, marks: Marks) -> Loss:
    """Make the loss with recomputed blocks in a scan."""

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda x, p: (block(p, x, cfg.heads, marks), None))
        x = lax.scan(body, gpt.embed(params, tokens), params["blocks"])[0]
        return gpt.head(params, x, tokens)

    return loss


def unrolled(cfg: Config, marks: Marks) -> Loss:
    """Make the loss with recomputed blocks one after the other."""

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        x = gpt.embed(params, tokens)
        one = jax.checkpoint(lambda x, p: block(p, x, cfg.heads, marks))
        for i, p in enumerate(params["blocks"]):
            with marks.scope(f"block{i}"):
                x = one(x, p)
        return gpt.head(params, x, tokens)

    return loss


def measured(
    cfg: Config, rounds: int, *, histogram: tuple[float, float] = (1.25, 1.25), rms: float = 1.05
) -> list[Result]:
    """Measure both forms of the model; `histogram` has the bars of scanned and unrolled blocks."""
    _require_exact_counts(cfg)
    kinds = (("scan", scanned, histogram[0]), ("unrolled", unrolled, histogram[1]))
    return [row for kind in kinds for row in _measure(cfg, rounds, *kind, rms)]


def _steps(cfg: Config, make: Callable[[Config, Any], Loss]) -> dict[str, gpt.Step]:
    marked = gpt.train_step(make(cfg, tapax))
    captured = {
        name: tapax.capture(marked, values={"**": asked}, grads={"**": asked})
        for name, asked in STATISTICS.items()
    }
    return {"plain": gpt.train_step(make(cfg, gpt.Bare())), **captured}


def _measure(
    cfg: Config,
    rounds: int,
    kind: str,
    make: Callable[[Config, Any], Loss],
    histogram: float,
    rms: float,
) -> list[Result]:
    args = cfg.arguments(stacked=make is scanned)
    steps = _steps(cfg, make)
    built: dict[str, Any] = {}
    for name, step in steps.items():
        built[name] = build(step, *args, donate=(0,))
    # The results of a step are the arguments of the next step, as in training.
    states = {name: jax.tree.map(jnp.copy, args[0]) for name in built}

    def run(name: str) -> Callable[[], Any]:
        def once() -> Any:
            out = built[name](states[name], args[1])
            (states[name], loss), *_ = (out,) if name == "plain" else out
            return loss

        return once

    times = race({name: run(name) for name in built}, rounds)
    topic = f"{cfg.layers} blocks, {kind}, remat, every layer"
    bars = {"rms": rms, "histogram": histogram, "four": None}
    rows = [
        Result.timed(topic, f"{name}, time over plain", times, name, "plain", bar=bar)
        for name, bar in bars.items()
    ]
    rows.append(
        Result.timed(topic, "four, time over histogram", times, "four", "histogram", bar=1.05)
    )
    used = {name: memory(program) for name, program in built.items()}
    rows += [
        Result(topic, f"{name}, memory over plain", used[name], used["plain"], "MiB", bar=1.02)
        for name in bars
    ]
    return rows


def first_calls(cfg: Config, rounds: int) -> list[Result]:
    """Time tracing and compiling, over the plain step, with new functions and empty caches."""
    args = cfg.arguments()

    def compiled(name: str) -> Callable[[], Any]:
        def compile_once() -> None:
            marked = gpt.train_step(unrolled(cfg, tapax))
            if name == "plain":
                step: Any = gpt.train_step(unrolled(cfg, gpt.Bare()))
            elif name == "everything":
                step = tapax.capture(marked)
            else:
                asked = {"**": STATISTICS[name]}
                step = tapax.capture(marked, values=asked, grads=asked)
            build(step, *args, donate=(0,))

        return compile_once

    bars = {"everything": 1.3, "rms": 1.4, "histogram": None}
    times = race(
        {name: compiled(name) for name in ("plain", *bars)},
        rounds,
        warmup=1,
        before=jax.clear_caches,
    )
    topic = f"{cfg.layers} blocks, unrolled, remat, first call"
    return [
        Result.timed(topic, f"{name}, over plain", times, name, "plain", bar=bar)
        for name, bar in bars.items()
    ]


def _require_exact_counts(cfg: Config) -> None:
    """Raise unless the histogram of a small model with the same dtype equals that of NumPy."""
    small = Config(layers=2, width=64, heads=4, length=64, batch=2, vocab=64, dtype=cfg.dtype)
    marked = gpt.train_step(scanned(small, tapax))
    args = small.arguments(stacked=True)
    whole = jax.jit(tapax.capture(marked))(*args)[1]
    taken = {"**": HISTOGRAM}
    counts = jax.jit(tapax.capture(marked, values=taken, grads=taken))(*args)[1]
    for name, value in whole.values.items():
        for layer, found in zip(np.asarray(value, np.float64), counts.values[name], strict=True):
            expected = np.histogram(np.abs(layer), np.asarray(HISTOGRAM.edges))[0]
            if np.abs(np.asarray(found) - expected).sum() > 0.001 * layer.size:
                raise SystemExit(f"The histogram of {name} is not NumPy's.")
