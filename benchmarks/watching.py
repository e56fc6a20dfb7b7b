"""Statistics inside the program, a monitor around a train step, and the search for a NaN.

`reduced`: the root mean square of every value and every gradient of scanned, recomputed layers,
over the plain step. `monitored`: a step with a monitor on every hundredth call, over the plain
step. `monitored_each`: a step with a monitor on every call, over the plain step, for the model of
`statistics` with a site for each layer. With `exact=False` the monitor runs one program, whose
state may differ from that of the plain step in the last bit; otherwise it runs the step and a copy.
`streamed`: a scan of 10,000 train steps that sends statistics of every hundredth
step, over the plain scan. `searched`: the first pass of `find_nonfinite`, which is the only pass if
it finds nothing, and `checkify`, over the plain step. `found`: the processor time to trace and
compile the second pass, which runs if the first finds something, over that of the plain step.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

import tapax
from benchmarks import gpt, statistics
from benchmarks.gpt import Config
from benchmarks.measure import Result, Times, build, memory, race, require_equal
from tapax.nonfinite._passes import SearchPasses
from tapax.nonfinite._search import NonfiniteSearch

RMS = {"**": tapax.reduce.rms}


def _rms(x: Any) -> np.ndarray:
    axes = tuple(range(1, x.ndim))
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axes))


def reduced(cfg: Config, rounds: int, bar: float = 1.05) -> list[Result]:
    args = cfg.arguments(stacked=True)
    plain = gpt.train_step(gpt.scanned(cfg, gpt.Bare()))
    marked = gpt.train_step(gpt.scanned(cfg, tapax))
    steps = {"plain": plain, "rms": tapax.capture(marked, values=RMS, grads=RMS)}
    built = {name: build(step, *args) for name, step in steps.items()}
    taps = built["rms"](*args)[1]
    whole = build(tapax.capture(marked), *args)(*args)[1]
    for found, kept in ((taps.values, whole.values), (taps.grads, whole.grads)):
        expected = {name: _rms(x) for name, x in kept.items()}
        require_equal("rms", dict(found), expected, 0.02 if cfg.dtype != np.float32 else 1e-4)
    times = race({name: lambda f=f: f(*args) for name, f in built.items()}, rounds)
    donated = {name: memory(build(step, *args, donate=(0,))) for name, step in steps.items()}
    topic = f"{cfg.layers} blocks, scan, remat, rms"
    return [
        Result(topic, "memory over plain", donated["rms"], donated["plain"], "MiB", bar=1.02),
        Result.timed(topic, "time over plain", times, "rms", "plain", bar=bar),
    ]


STEPS = 300


def _equal(a: Any, b: Any) -> bool:
    """Return whether two runs ended equally; a GPU may add numbers in another order each time."""
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def monitored(cfg: Config, rounds: int) -> list[Result]:
    params, tokens = cfg.arguments()
    plain = jax.jit(gpt.train_step(gpt.unrolled(cfg, tapax)))
    log = tapax.Log()

    def run(step: Any) -> Any:
        state = params
        for _ in range(STEPS):
            state, _ = step(state, tokens)
        return state

    with tapax.monitor(plain, every=100, to=log) as watched:
        watched(params, tokens)
        first = run(plain)
        if not _equal(first, run(watched)) and _equal(first, run(plain)):
            raise SystemExit("The monitored run ended with other parameters than the plain one.")
        entrants = {"monitored": lambda: run(watched), "plain": lambda: run(plain)}
        times = race(entrants, rounds, warmup=0)
    if len(log) != 1 + (rounds + 1) * STEPS // 100:
        raise SystemExit(f"The log has {len(log)} records.")
    topic = f"{cfg.layers} blocks, monitor(every=100)"
    return [Result.timed(topic, f"{STEPS} steps over plain", times, "monitored", "plain", bar=1.02)]


def monitored_each(cfg: Config, rounds: int) -> list[Result]:
    params, tokens = cfg.arguments()
    plain = jax.jit(gpt.train_step(statistics.unrolled(cfg, tapax)))
    logs = {"exact": tapax.Log(), "one program": tapax.Log()}
    monitors = {
        name: tapax.monitor(plain, every=1, to=log, exact=name == "exact")
        for name, log in logs.items()
    }

    def run(step: Any) -> Any:
        state = params
        for _ in range(10):
            state, _ = step(state, tokens)
        return state

    expected = run(plain)
    require_equal("one program", run(monitors["one program"]), expected, 1e-2)
    entrants = {name: lambda step=step: run(step) for name, step in monitors.items()}
    times = race({**entrants, "plain": lambda: run(plain)}, rounds, warmup=1)
    for monitor in monitors.values():
        monitor.close()
    if len(logs["exact"]) != 10 * (rounds + 1):
        raise SystemExit(f"The log has {len(logs['exact'])} records.")
    topic = f"{cfg.layers} blocks, {len(logs['exact'].names)} statistics, monitor(every=1)"
    one = "10 steps with exact=False over plain"
    return [
        Result.timed(topic, one, times, "one program", "plain", bar=1.05),
        Result.timed(topic, "10 steps over plain", times, "exact", "plain"),
    ]


LENGTH, LAYERS, WIDTH, ROWS = 10_000, 3, 128, 128


def streamed(rounds: int) -> list[Result]:
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)

    def loss(weights: Any, x: Any) -> Any:
        for i, w in enumerate(weights):
            x = tapax.sow(jnp.tanh(x @ w), f"layer{i}")
        return jnp.mean(x**2)

    @jax.jit
    def train(weights: Any) -> Any:
        def step(weights: Any, number: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(weights, x * jnp.cos(number))
            return weights - 0.1 * grads, value

        return jax.lax.scan(step, weights, jnp.arange(LENGTH, dtype=jnp.float32))

    log = tapax.Log()
    watched = tapax.stream(train, every=100, to=log)
    if not _equal(train(weights), watched(weights)):
        raise SystemExit("The streamed loop ended with other weights than the plain one.")
    if log.steps.tolist() != list(range(0, LENGTH, 100)) or len(log.names) != 2 * LAYERS:
        raise SystemExit(f"The log has {len(log)} records of {len(log.names)} names.")
    entrants = {"streamed": lambda: watched(weights), "plain": lambda: train(weights)}
    times = race(entrants, rounds, warmup=1)
    watched.close()
    topic = f"scan of {LENGTH} train steps, stream(every=100)"
    return [Result.timed(topic, "time over plain", times, "streamed", "plain", bar=1.05)]


def searched(cfg: Config, rounds: int) -> list[Result]:
    args = cfg.arguments(stacked=True)
    step = jax.jit(gpt.train_step(gpt.scanned(cfg, gpt.Bare())))
    search = tapax.find_nonfinite(step)
    if search(*args) is not None:
        raise SystemExit("A clean step was found to have a NaN.")
    checked = jax.jit(checkify.checkify(step, errors=checkify.float_checks))
    entrants = {"search": lambda: search(*args), "plain": lambda: step(*args)}
    times = race({**entrants, "checkify": lambda: checked(*args)}, rounds)
    topic = f"{cfg.layers} blocks, scan, remat, find_nonfinite"
    return [
        Result.timed(topic, "first pass over plain", times, "search", "plain", bar=1.3),
        Result.timed(topic, "checkify over plain", times, "checkify", "plain"),
    ]


def found(cfg: Config, rounds: int) -> list[Result]:
    models = {
        "unrolled": (gpt.unrolled(cfg, gpt.Bare()), cfg.arguments()),
        "scan, remat": (gpt.scanned(cfg, gpt.Bare()), cfg.arguments(stacked=True)),
    }
    return [
        _second_pass(f"{cfg.layers} blocks, {name}, find_nonfinite", loss, args, rounds)
        for name, (loss, args) in models.items()
    ]


def _second_pass(topic: str, loss: Any, args: Any, rounds: int) -> Result:
    step = jax.jit(gpt.train_step(loss))
    params, tokens = args
    bad = dict(params, head=params["head"] * 1e38), tokens
    call = NonfiniteSearch(step).traced_call(bad)
    passes = SearchPasses(call.program.jaxpr, False)
    if passes(*call.arrays) is None:
        raise SystemExit("The search found no infinity in a step that has one.")
    search = passes.second_pass(False, False, call.arrays)
    times: Times = {"search": [], "plain": []}
    for _ in range(rounds):
        for name, fn, given in (("search", search, call.arrays), ("plain", step, bad)):
            jax.clear_caches()
            start = time.process_time()
            fn.lower(*given).compile()
            times[name].append(time.process_time() - start)
    measure = "compiling the second pass over plain"
    return Result.timed(topic, measure, times, "search", "plain", bar=2.5)
