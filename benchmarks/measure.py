"""Measurement, judgement and display of ratios.

    times = race({"captured": f, "hand": g}, rounds=40)
    Result.timed("step", "run time", times, "captured", "hand", bar=1.03)

Two programs run in one process, in turns, so that other work of the machine slows both equally;
their ratio is the median over the rounds. Memory is the exact amount that the compiler reports for
a program.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Times = dict[str, list[float]]

MIB = 2**20


@dataclass(frozen=True)
class Result:
    """The ratio of `top` to `base`, both in `unit`, which may be at most `bar`.

    The result of a race has the quartiles of its ratio over the rounds; the median is the ratio.
    `holds` is a further condition for passing. A result without a bar is only informative.
    """

    topic: str
    measure: str
    top: float
    base: float
    unit: str
    bar: float | None = None
    quartiles: tuple[float, float, float] | None = None
    holds: bool = True

    @property
    def ratio(self) -> float:
        return self.quartiles[1] if self.quartiles else self.top / self.base

    @property
    def passed(self) -> bool | None:
        return None if self.bar is None else self.holds and self.ratio <= self.bar

    @classmethod
    def timed(
        cls, topic: str, measure: str, times: Times, top: str, base: str, bar: float | None = None
    ) -> Result:
        """Compare two entrants of a `race`; their times are medians over the rounds."""
        seconds = statistics.median(times[top]), statistics.median(times[base])
        unit, scale = ("ms", 1e3) if seconds[1] >= 1e-3 else ("us", 1e6)
        low, middle, high = np.quantile(np.divide(times[top], times[base]), [0.25, 0.5, 0.75])
        quartiles = (float(low), float(middle), float(high))
        return cls(topic, measure, seconds[0] * scale, seconds[1] * scale, unit, bar, quartiles)

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "passed": self.passed}


def race(
    entrants: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    calls: int = 1,
    warmup: int = 2,
    before: Callable[[], object] = lambda: None,
) -> Times:
    """Measure the seconds per call of each entrant, once per round.

    Each round runs every entrant once. The order is reversed from round to round, so that no
    entrant always profits from the caches that another has filled. Each timing repeats an entrant
    `calls` times, for calls that are too short to time alone, and runs `before` first, untimed.
    """
    times: Times = {name: [] for name in entrants}
    for turn in range(-warmup, rounds):
        for name in list(entrants)[:: 1 if turn % 2 else -1]:
            entrant = entrants[name]
            before()
            gc.collect()
            gc.disable()
            out = None
            start = time.perf_counter()
            for _ in range(calls):
                out = entrant()
            jax.block_until_ready(out)
            seconds = (time.perf_counter() - start) / calls
            gc.enable()
            del out
            if turn >= 0:
                times[name].append(seconds)
    return times


def fastest(times: Times) -> str:
    return min(times, key=lambda name: statistics.median(times[name]))


def build(
    step: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    return jax.jit(step, donate_argnums=donate).lower(*args).compile()


def flat(f: Callable[..., Any], state: Any, x: jax.Array) -> Callable[[], Any]:
    """Make a compiled call of `f` that takes a list of arrays, as flattening pytrees takes time."""
    leaves, treedef = jax.tree.flatten(state)
    compiled = build(lambda leaves, x: f(treedef.unflatten(leaves), x), leaves, x)
    return lambda: compiled(leaves, x)


def memory(compiled: jax.stages.Compiled) -> float:
    """Return the MiB of temporaries and outputs, without outputs that reuse donated arguments."""
    stats: Any = compiled.memory_analysis()
    taken = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return taken / MIB


def in_all(compiled: jax.stages.Compiled) -> float:
    """Return the MiB of a program and its arguments."""
    stats: Any = compiled.memory_analysis()
    return memory(compiled) + stats.argument_size_in_bytes / MIB


def size(tree: Any) -> float:
    """Return the MiB of the arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / MIB


@jax.jit
def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((a - b) ** 2)) / (jnp.sqrt(jnp.mean(b**2)) + 1e-30)


def require_equal(what: str, actual: Any, expected: Any, tolerance: float) -> None:
    """Raise unless two trees of arrays agree: the ratio of different programs means nothing.

    The difference of two arrays is the root mean square of their difference, relative to that of
    the expected array. Rounding in another order keeps it small in any precision.
    """
    distances = jax.tree.map(_distance, actual, expected)
    for path, distance in jax.tree.leaves_with_path(distances):
        if not distance <= tolerance:
            where = what + jax.tree_util.keystr(path)
            raise AssertionError(f"{where} differs by {distance:.1e} (allowed {tolerance:.1e}).")


HEADS = ("measure", "ratio", "quartiles", "bar", "", "numbers")


def rows(results: Iterable[Result]) -> list[tuple[str, ...]]:
    verdict = {True: "pass", False: "MISS", None: ""}
    return [
        (
            f"{r.topic}: {r.measure}",
            f"{r.ratio:.3f}",
            f"{r.quartiles[0]:.3f} .. {r.quartiles[2]:.3f}" if r.quartiles else "",
            "" if r.bar is None else f"{r.bar:.2f}",
            verdict[r.passed],
            f"{r.top:.5g} / {r.base:.5g} {r.unit}",
        )
        for r in results
    ]


def show(results: Iterable[Result]) -> None:
    """Print the results as one table; without rich, as plain text."""
    lines = rows(results)
    widths = [max(map(len, column)) for column in zip(HEADS, *lines, strict=True)]
    device = jax.devices()[0]
    title = f"tapax on {device.device_kind} ({device.platform}), jax {jax.__version__}"
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for line in (HEADS, *lines):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = Table(title=title)
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("measure", "") else "right", no_wrap=True)
    styles = {"pass": "green", "MISS": "bold red"}
    for line in lines:
        table.add_row(*line, style=styles.get(line[4]))
    console = Console()
    # Do not cut a report in a file or a pipe to the width of a screen.
    console.width = max(console.width, sum(widths) + 3 * len(widths) + 1)
    console.print(table)
