"""What capture adds to tracing, and that it grows with the program alone.

Every figure is taken on functions made for it, with all of JAX's caches cleared, so that nothing
traced before is found again.
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
    """Equations of a jaxpr and of all the jaxprs inside it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    inner = (sub for eqn in jaxpr.eqns for sub in jax.tree.leaves(list(eqn.params.values())))
    return len(jaxpr.eqns) + sum(equations(sub) for sub in inner if hasattr(sub, "eqns"))


def tracers(make: Make, args: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """Trace `make()` with and without capture; the results are dropped, as only time counts."""

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
    """`depth` scans inside each other, each with as many marked products.

    There are enough of them that what a trace costs once weighs little at depth 1.
    """

    def level(n: int, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for i in range(products):
                x = tapax.sow(jnp.sin(x) * x, f"depth{n}/product{i}")
            return (level(n + 1, x) if n < depth else x), None

        return lax.scan(body, x, None, length=2)[0]

    return lambda x: level(1, x).sum()


def nested(deepest: int, rounds: int) -> list[Result]:
    """Cost per equation of the plain program, in the deepest nest and in one scan alone.

    JAX's own differentiation of nested scans costs more per equation the deeper they are. There
    the bar is on what capture makes of it: captured over plain, and that over the same in one scan.
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
