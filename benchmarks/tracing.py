"""The time that a capture adds to tracing, which must grow only with the size of the program.

Every measurement uses new functions and clears all caches of JAX, so that no trace is reused.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tapax
from benchmarks import gpt
from benchmarks.gpt import Config
from benchmarks.measure import Result, race

Make = Callable[[], Callable[..., Any]]


def equations(jaxpr: Any) -> int:
    """Count the equations of a jaxpr and of all jaxprs inside it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    inner = (sub for eqn in jaxpr.eqns for sub in jax.tree.leaves(list(eqn.params.values())))
    return len(jaxpr.eqns) + sum(equations(sub) for sub in inner if hasattr(sub, "eqns"))


def tracers(make: Make, args: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """Make functions that trace `make()` with and without capture, and drop the results."""

    def plain() -> None:
        jax.make_jaxpr(make())(*args)

    def captured() -> None:
        jax.make_jaxpr(tapax.capture(make()))(*args)

    return {"captured": captured, "plain": plain}


def unrolled(blocks: int, rounds: int) -> list[Result]:
    cfg = Config(layers=blocks, width=16, length=16, batch=1, vocab=16)
    args = cfg.arguments()
    results = []
    for what, wrap in (("step", lambda f: f), ("jitted step", jax.jit)):
        entrants = tracers(lambda wrap=wrap: wrap(gpt.train_step(gpt.unrolled(cfg, tapax))), args)
        times = race(entrants, rounds, warmup=1, before=jax.clear_caches)
        topic = f"tracing {blocks} blocks"
        results += [Result.timed(topic, f"{what}, over plain", times, "captured", "plain", bar=2.0)]
    return results


def nest(depth: int, products: int = 32) -> Callable[[jax.Array], jax.Array]:
    """Nest `depth` scans, each with `products` marked products.

    The number of products is so large that the fixed cost of a trace matters little at depth 1.
    """

    def level(n: int, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for i in range(products):
                x = tapax.sow(jnp.sin(x) * x, f"depth{n}/product{i}")
            return (level(n + 1, x) if n < depth else x), None

        return lax.scan(body, x, None, length=2)[0]

    return lambda x: level(1, x).sum()


def nested(deepest: int, rounds: int) -> list[Result]:
    """Measure the cost per equation of the plain program, in the deepest nest and in one scan.

    JAX's differentiation of nested scans costs more per equation the deeper they are. So, with a
    gradient, the bar is for the ratio of captured to plain in the nest, over that in one scan.
    """
    args = (np.ones(2, np.float32),)
    topic, results = f"{deepest} nested scans", []
    for what, wrap in (("forward", lambda f: f), ("with gradient", jax.value_and_grad)):
        entrants, count = {}, {}
        for depth in (1, deepest):
            make = partial(_wrapped, wrap, depth)
            count[depth] = equations(jax.make_jaxpr(make())(*args))
            for name, trace in tracers(make, args).items():
                entrants[f"{name} {depth}"] = trace
        times = race(entrants, rounds, warmup=1, before=jax.clear_caches)
        cost = {e: [t / count[int(e.split()[1])] for t in times[e]] for e in times}
        linear = what == "forward"
        for name, bar in (("captured", 1.5 if linear else None), ("plain", None)):
            measure = f"{what}, {name}, per equation, over one scan"
            pair = f"{name} {deepest}", f"{name} 1"
            results += [Result.timed(topic, measure, cost, *pair, bar=bar)]
        if not linear:
            measure = f"{what}, captured over plain, over one scan"
            median = {entrant: statistics.median(cost[entrant]) for entrant in cost}
            top, base = (median[f"captured {d}"] / median[f"plain {d}"] for d in (deepest, 1))
            results += [Result(topic, measure, top, base, "", bar=1.5)]
    return results


def _wrapped(wrap: Callable[[Any], Any], depth: int) -> Callable[..., Any]:
    return wrap(nest(depth))
