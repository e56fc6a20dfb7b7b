"""How a ratio is taken, judged and shown.

    times = race({"captured": f, "hand": g}, rounds=40)
    Result.timed("step", "run time", times, "captured", "hand", bar=1.03)

Two programs are timed in one process, in turns, so that whatever else the machine does falls on
both alike; their ratio is the median over the rounds. Memory is what the compiler says the program
takes, which is exact.
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
    """`top` over `base`, both in `unit`, which may be at most `bar`.

    What was timed has the quartiles of its ratio over the rounds; their median is its ratio.
    `holds` is a condition that must be met besides the bar. Without a bar a result only informs.
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
    """Seconds per call of each entrant, one figure per round.

    Each round runs every entrant once, in an order reversed from round to round, so that none
    always profits from what the one before it left in the caches. `calls` repeats inside one timing
    what is too short to be timed alone; `before` is run, untimed, before each timing.
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
    """A compiled call of a function on a list of arrays: structures take time to be taken apart."""
    leaves, treedef = jax.tree.flatten(state)
    compiled = build(lambda leaves, x: f(treedef.unflatten(leaves), x), leaves, x)
    return lambda: compiled(leaves, x)


def memory(compiled: jax.stages.Compiled) -> float:
    """MiB of temporaries and of outputs, less those that lie in donated arguments."""
    stats: Any = compiled.memory_analysis()
    taken = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return taken / MIB


def in_all(compiled: jax.stages.Compiled) -> float:
    """MiB of a program and of its arguments."""
    stats: Any = compiled.memory_analysis()
    return memory(compiled) + stats.argument_size_in_bytes / MIB


def size(tree: Any) -> float:
    """MiB of the arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / MIB


@jax.jit
def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((a - b) ** 2)) / (jnp.sqrt(jnp.mean(b**2)) + 1e-30)


def require_equal(what: str, actual: Any, expected: Any, tolerance: float) -> None:
    """Raise unless two trees of arrays agree: a ratio is worth nothing over another program.

    The difference is taken relative to the size of each array, by root mean square, which rounding
    in another order leaves small in any precision.
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
    # A report read from a file or a pipe must not be cut to the width of a screen.
    console.width = max(console.width, sum(widths) + 3 * len(widths) + 1)
    console.print(table)
