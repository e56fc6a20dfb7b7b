"""The growth of the cost of a capture with the sites, the depth of nested loops, and the devices.

    python -m benchmarks.scaling [--only PART] [--most SITES] [--json PATH]

`sites`: a chain of marked operations and its gradient, plain, with everything captured, and with
the rms of everything: processor time to trace and to compile, and time to run. `depth`: nested
scans. `devices`: a sharded train step with statistics: its run time, and the elements that its
collectives move beyond those of the plain step, according to the compiled program.

`docs/benchmarks.md` draws the numbers of `docs/scaling.json`, which `--json docs/scaling.json`
writes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure

import tapax
from benchmarks.measure import Result, race
from benchmarks.tracing import equations, nest

R = tapax.reduce
Row = dict[str, Any]
COUNTS = (10, 100, 300, 1000, 10000)
MOST_COMPILED = 300
DEPTHS = (1, 2, 4, 8)
STATISTICS: dict[str, Any] = {
    "rms": R.rms,
    "minmax": R.minmax,
    "nonfinite": R.nonfinite,
    "moments": R.moments,
    "histogram": R.histogram(log2=(-14, 12)),
    "quantiles": R.quantiles(),
    "topk": R.topk(8),
}
TIMED = ("rms", "histogram")


def chain(sites: int) -> Callable[[jax.Array], Any]:
    """Make a loss with `sites` marked values in a chain, and its gradient."""

    def loss(x: jax.Array) -> jax.Array:
        for i in range(sites):
            x = tapax.sow(jnp.sin(x), f"h{i}")
        return x.sum()

    return jax.value_and_grad(loss)


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda step: step,
    "everything": tapax.capture,
    "rms": lambda step: tapax.capture(step, values=R.rms, grads=R.rms),
}


def measure_sites(counts: Sequence[int], rounds: int) -> list[Row]:
    """Measure the least processor time to trace, and the times to compile and run, of each kind."""
    x = jnp.ones(64)
    rows: list[Row] = []
    for wrap in KINDS.values():
        jax.jit(wrap(chain(3))).lower(x)
    for count in counts:
        for kind, wrap in KINDS.items():
            times = []
            for _ in range(rounds if count <= MOST_COMPILED else 1):
                jax.clear_caches()
                start = time.process_time()
                traced = jax.jit(wrap(chain(count))).trace(x)
                times.append(time.process_time() - start)
            row: Row = {"kind": kind, "sites": count, "trace": min(times)}
            if count <= MOST_COMPILED:
                lowered = traced.lower()
                start = time.process_time()
                compiled = lowered.compile()
                row["compile"] = time.process_time() - start
                row["run"] = min(race({kind: lambda f=compiled: f(x)}, 10)[kind])
            rows.append(row)
    return rows


def measure_depth(depths: Sequence[int], rounds: int) -> list[Row]:
    """Measure the least processor time to trace an equation in nested scans."""
    x = np.ones(2, np.float32)
    rows: list[Row] = []
    for depth in depths:
        count = equations(jax.make_jaxpr(jax.value_and_grad(nest(depth, 8)))(x))
        for kind, wrap in KINDS.items():
            times = []
            for _ in range(rounds):
                jax.clear_caches()
                start = time.process_time()
                jax.make_jaxpr(wrap(jax.value_and_grad(nest(depth, 8))))(x)
                times.append(time.process_time() - start)
            rows.append({"kind": kind, "depth": depth, "equation": min(times) / count})
    return rows


def sharded_step(params: Sequence[jax.Array], x: jax.Array) -> Any:
    """Run a train step of a few layers, whose batch or features are divided over devices."""

    def loss(params: Sequence[jax.Array]) -> jax.Array:
        h = x
        for i, w in enumerate(params):
            h = tapax.sow(jnp.tanh(h @ w), f"h{i}")
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.01 * g for p, g in zip(params, grads, strict=True)], value


def measure_devices(counts: Sequence[int], rounds: int) -> list[Row]:
    """Measure the run time and the collectives of a sharded step, with and without statistics.

    It compiles all statistics only for the largest number of devices.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 32, 256)).astype(np.float32)
    weights = [rng.normal(0, 1 / 16, (256, 256)).astype(np.float32) for _ in range(2)]
    rows: list[Row] = []
    for count in counts:
        mesh = Mesh(np.array(jax.devices()[:count]), ("d",))
        for divided, spec in (("batch", P("d")), ("features", P(None, None, "d"))):
            by = NamedSharding(mesh, spec)
            across = NamedSharding(mesh, P(None, "d") if divided == "features" else P())
            args = [jax.device_put(w, across) for w in weights], jax.device_put(x, by)
            steps: dict[str, Any] = {"plain": sharded_step}
            for name in STATISTICS if count == counts[-1] else TIMED:
                reducer = STATISTICS[name]
                steps[name] = tapax.capture(sharded_step, values=reducer, grads=reducer)
            built = {name: jax.jit(step).lower(*args).compile() for name, step in steps.items()}
            times = race(
                {name: lambda f=f, args=args: f(*args) for name, f in built.items()}, rounds
            )
            plain = moved(built["plain"])
            for name, program in built.items():
                added = moved(program)
                added.subtract(plain)
                rows.append(
                    {
                        "devices": count,
                        "divided": divided,
                        "kind": name,
                        "run": min(times[name]),
                        "added": {operation: n for operation, n in added.items() if n > 0},
                        "values": 2 * len(weights) * x.size,
                    }
                )
    return rows


def moved(compiled: jax.stages.Compiled) -> Counter[str]:
    """Count the elements that the collectives of a program return, by operation."""
    found: Counter[str] = Counter()
    pattern = (
        r"= (\(?[^=]*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
        r"(?:-start)?\("
    )
    text = re.sub(r"/\*.*?\*/", "", compiled.as_text() or "")
    for shapes, operation in re.findall(pattern, text):
        sizes = re.findall(r"\w+\[([\d,]*)\]", shapes)
        found[operation] += sum(math.prod(int(n) for n in size.split(",") if n) for size in sizes)
    return found


def judged(rows: dict[str, list[Row]]) -> list[Result]:
    """Convert the rows to ratios with their bars."""
    results: list[Result] = []
    for kind in KINDS if "sites" in rows else ():
        each = {r["sites"]: r["trace"] / r["sites"] for r in rows["sites"] if r["kind"] == kind}
        most, base = max(each), 100
        measure = f"{kind}: tracing one of {most} sites, over one of {base}"
        bar = None if kind == "plain" else 1.3
        pair = each[most] * 1e6, each[base] * 1e6
        results.append(Result("scaling", measure, *pair, "us", bar=bar))
    for name in STATISTICS if "devices" in rows else ():
        added = [r for r in rows["devices"] if r["kind"] == name and r["devices"] > 1]
        most = max((sum(r["added"].values()) for r in added), default=0)
        measure = f"{name}: elements that collectives move, over those of the values"
        bar = None if name == "topk" else 0.01
        results.append(Result("scaling", measure, most, added[0]["values"], "", bar=bar))
    return results


def measure_part(part: str, most: int, rounds: int) -> list[Row]:
    """Measure one of `PARTS`, on at most eight devices."""
    if part == "sites":
        return measure_sites([n for n in COUNTS if n <= most], rounds)
    if part == "depth":
        return measure_depth(DEPTHS, rounds)
    return measure_devices([n for n in (1, 2, 4, 8) if n <= jax.device_count()], 5 * rounds)


PARTS = ("devices", "depth", "sites")


STORED = Path(__file__).parents[1] / "docs" / "scaling.json"
"""The numbers that `docs/benchmarks.md` draws."""


def draw_sites(rows: dict[str, list[Row]]) -> Figure:
    """Draw the times to trace, compile and run against the number of sites."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, cost in zip(panels, ("trace", "compile", "run"), strict=True):
        for kind in KINDS:
            found = [r for r in rows["sites"] if r["kind"] == kind and cost in r]
            axes.loglog([r["sites"] for r in found], [r[cost] for r in found], "o-", label=kind)
        axes.set(title=f"time to {cost}", xlabel="sites", ylabel="seconds")
    panels[0].legend(frameon=False)
    return figure


def draw_depth(rows: dict[str, list[Row]]) -> Figure:
    """Draw the time to trace an equation against the depth of nested scans."""
    figure = Figure(figsize=(4.5, 2.8), layout="constrained")
    axes = figure.subplots()
    for kind in KINDS:
        found = [r for r in rows["depth"] if r["kind"] == kind]
        times = [1e3 * r["equation"] for r in found]
        axes.plot([r["depth"] for r in found], times, "o-", label=kind)
    axes.set(
        title="time to trace an equation", xlabel="nested scans", ylabel="milliseconds", ylim=0
    )
    axes.legend(frameon=False)
    return figure


def draw_devices(rows: dict[str, list[Row]]) -> Figure:
    """Draw the time to run a sharded step against the number of devices."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, divided in zip(panels, ("batch", "features"), strict=True):
        for name in ("plain", *TIMED):
            found = [r for r in rows["devices"] if (r["kind"], r["divided"]) == (name, divided)]
            times = [1e3 * r["run"] for r in found]
            axes.plot([r["devices"] for r in found], times, "o-", label=name)
        axes.set(
            title=f"time to run, {divided} divided", xlabel="devices", ylabel="milliseconds", ylim=0
        )
    panels[1].legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description="How the cost of a capture grows."
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; repeatable")
    parser.add_argument("--most", type=int, default=COUNTS[-1], help="the most sites")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every number there")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    sys.setrecursionlimit(10**5)
    rows: dict[str, list[Row]] = {}
    for part in options.only or PARTS:
        rows[part] = measure_part(part, options.most, options.rounds)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    from benchmarks import measure

    measure.show(judged(rows))
    for row in rows.get("devices", ()):
        print(row)


if __name__ == "__main__":
    main()
