"""Captures of every site of a train step, over a step that returns them by hand.

`unrolled`: a 12-layer GPT, 36 values and 36 gradients, over the best of three handwritten steps.
`remat`: these blocks in a scan that recomputes them; the captured step may take hardly more memory
than the plain step and the captured arrays together. `idle`: marks without a capture.
"""

from __future__ import annotations

from typing import Any

import jax

import tapax
from benchmarks import gpt, hand
from benchmarks.gpt import Config
from benchmarks.measure import Result, build, fastest, memory, race, require_equal, size


def tolerance(cfg: Config) -> float:
    """Return a tolerance for the rounding of all layers in another order."""
    return max(1e-5, 4 * float(jax.numpy.finfo(cfg.dtype).eps) * cfg.layers**0.5)


def as_hand(out: Any, taps: tapax.Taps) -> hand.Hand:
    return out, dict(taps.values), dict(taps.grads)


def unrolled(cfg: Config, rounds: int) -> list[Result]:
    args = cfg.arguments()
    written = {name: build(step, *args) for name, step in hand.unrolled(cfg).items()}
    plain = build(gpt.train_step(gpt.unrolled(cfg, gpt.Bare())), *args)
    captured = build(tapax.capture(gpt.train_step(gpt.unrolled(cfg, tapax))), *args)
    expected = written["vjp by block"](*args)
    require_equal("captured", as_hand(*captured(*args)), expected, tolerance(cfg))

    # Choose the best handwritten step before the race that counts: the least of three noisy times
    # in one race would be too low.
    heats = race({name: lambda f=f: f(*args) for name, f in written.items()}, max(rounds // 4, 3))
    best, least = fastest(heats), min(written, key=lambda name: memory(written[name]))
    entrants = {"captured": captured, "hand": written[best], "plain": plain}
    times = race({name: lambda f=f: f(*args) for name, f in entrants.items()}, rounds)
    mib = {name: memory(f) for name, f in entrants.items()}
    topic = f"{cfg.layers} blocks"
    return [
        Result.timed(topic, f"time over by hand ({best})", times, "captured", "hand", bar=1.03),
        Result(
            topic,
            f"memory over by hand ({least})",
            mib["captured"],
            memory(written[least]),
            "MiB",
            bar=1.01,
        ),
        Result.timed(topic, "time over plain", times, "captured", "plain"),
        Result(
            topic,
            "memory over plain + captured",
            mib["captured"],
            mib["plain"] + size(expected[1:]),
            "MiB",
        ),
    ]


def remat(cfg: Config, rounds: int) -> list[Result]:
    args = cfg.arguments(stacked=True)
    steps = {
        "plain": gpt.train_step(gpt.scanned(cfg, gpt.Bare())),
        "hand": hand.by_vjp_scanned(cfg),
        "captured": tapax.capture(gpt.train_step(gpt.scanned(cfg, tapax))),
    }
    built = {name: build(step, *args) for name, step in steps.items()}
    expected = built["hand"](*args)
    require_equal("captured", as_hand(*built["captured"](*args)), expected, tolerance(cfg))
    times = race({name: lambda f=f: f(*args) for name, f in built.items()}, rounds)

    # Without donated parameters, the compiler keeps temporaries in the space of outputs that are
    # not yet written, if they happen to fit: by whole stacks more or fewer, also in the handwritten
    # step. A training step donates its parameters, which leaves nothing to chance.
    kept = {name: memory(f) for name, f in built.items()}
    donated = {name: memory(build(step, *args, donate=(0,))) for name, step in steps.items()}
    outputs = size(expected[1:])
    topic = f"{cfg.layers} blocks, scan, remat"
    return [
        Result(
            topic,
            "memory over plain + captured",
            donated["captured"],
            donated["plain"] + outputs,
            "MiB",
            bar=1.05,
        ),
        Result(topic, "memory over by hand", donated["captured"], donated["hand"], "MiB"),
        Result(
            topic,
            "not donated: memory over plain + captured",
            kept["captured"],
            kept["plain"] + outputs,
            "MiB",
        ),
        Result(topic, "not donated: memory over by hand", kept["captured"], kept["hand"], "MiB"),
        Result.timed(topic, "time over plain", times, "captured", "plain"),
        Result.timed(topic, "time over by hand", times, "captured", "hand"),
    ]


def idle(cfg: Config, rounds: int) -> list[Result]:
    args = cfg.arguments()
    steps = {
        "marked": gpt.train_step(gpt.unrolled(cfg, tapax)),
        "bare": gpt.train_step(gpt.unrolled(cfg, gpt.Bare())),
    }
    # An earlier capture must not leave anything behind.
    jax.eval_shape(tapax.capture(steps["marked"]), *args)
    jaxprs = {name: jax.make_jaxpr(step)(*args) for name, step in steps.items()}
    identical = str(jaxprs["marked"]) == str(jaxprs["bare"])
    lines = {name: float(str(jaxpr).count("\n") + 1) for name, jaxpr in jaxprs.items()}
    jitted = {name: jax.jit(step) for name, step in steps.items()}
    times = race({name: lambda f=f: f(*args) for name, f in jitted.items()}, rounds)
    topic = "marks, no capture"
    program = "jaxpr, identical" if identical else "jaxpr, DIFFERENT"
    return [
        Result(topic, program, lines["marked"], lines["bare"], "lines", 1.0, holds=identical),
        Result.timed(topic, "time over no marks", times, "marked", "bare"),
    ]
