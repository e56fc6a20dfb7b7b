"""Measure everything and print one table of ratios.

python -m benchmarks.run [--quick] [--only NAME] [--json PATH] [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import (
    calling,
    changes,
    datasets,
    hidden,
    importing,
    jax_peers,
    measure,
    statistics,
    step,
    tracing,
    watching,
)
from benchmarks.gpt import Config
from benchmarks.measure import Result

Topic = Callable[[int], list[Result]]


def framework(module: str, function: str, *args: Any) -> Topic:
    """Make a topic that imports a framework only when it runs, as imports slow other topics."""
    return lambda rounds: getattr(import_module(f"benchmarks.{module}"), function)(*args, rounds)


CALLED = Config(layers=24, width=16, heads=2, length=8, batch=1, vocab=16)
"""A model whose step takes longer to call than to compute."""
EACH = Config(layers=24)
"""A model with seven sites in each block: 336 statistics of values and gradients."""

# Each topic with its number of rounds, and its number of rounds under --quick.
TOPICS: dict[str, tuple[Topic, int, int]] = {
    "import": (importing.over_jax, 15, 5),
    "step": (lambda rounds: step.unrolled(Config(), rounds), 60, 8),
    "remat": (lambda rounds: step.remat(Config(), rounds), 30, 5),
    "idle": (lambda rounds: step.idle(Config(), rounds), 30, 5),
    "trace": (lambda rounds: tracing.unrolled(48, rounds), 7, 3),
    "nested": (lambda rounds: tracing.nested(8, rounds), 9, 3),
    "call": (calling.all_sizes, 60, 20),
    "edit": (lambda rounds: changes.edited(Config(), rounds), 60, 8),
    "grad": (lambda rounds: changes.gradient(Config(), rounds), 60, 8),
    "prefix": (lambda rounds: changes.prefix(Config(), rounds), 60, 8),
    "reduce": (lambda rounds: watching.reduced(Config(), rounds), 40, 5),
    "statistics": (lambda rounds: statistics.measured(Config(width=256), rounds), 15, 3),
    "first-call": (
        lambda rounds: statistics.first_calls(Config(layers=24, width=256), rounds),
        5,
        2,
    ),
    "monitor": (lambda rounds: watching.monitored(Config(), rounds), 5, 1),
    "monitor-each": (lambda rounds: watching.monitored_each(EACH, rounds), 7, 2),
    "stream": (watching.streamed, 7, 2),
    "nonfinite": (lambda rounds: watching.searched(Config(), rounds), 30, 5),
    "nonfinite-found": (lambda rounds: watching.found(Config(), rounds), 5, 2),
    "dataset-write": (datasets.written, 7, 2),
    "dataset-read": (datasets.read, 20, 4),
    "dataset-workers": (datasets.workers, 5, 1),
    "hidden": (hidden.unrolled, 30, 5),
    "braintrace": (lambda rounds: jax_peers.raced("recurrent", rounds), 40, 5),
    "probly": (lambda rounds: jax_peers.raced("batch_ensemble", rounds), 60, 8),
    "ensembles": (framework("ensembles", "separate"), 40, 5),
    "patching": (framework("patching", "raced", 64, 10, 30), 3, 1),
    "patching-768": (framework("patching", "raced", 768, 2, 30), 2, 1),
    "nnx": (framework("nnx_step", "unrolled", Config()), 30, 5),
    "nnx-call": (framework("nnx_step", "calling", CALLED), 40, 10),
    "equinox-call": (framework("equinox_call", "calling"), 40, 10),
    "nnx-remat": (framework("nnx_step", "remat", Config(layers=24, batch=8)), 1, 1),
    "linen": (framework("linen_step", "unrolled", Config()), 30, 5),
    "eager": (framework("modules", "eager", 256), 20, 5),
    "adapters": (framework("modules", "tracing", 12), 9, 3),
    "page": (framework("viewer", "measured", 5_000, 5_000), 5, 1),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Speed and memory of tapax."
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a rough look")
    parser.add_argument("--only", action="append", choices=TOPICS, help="this topic; repeatable")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    options = parser.parse_args()

    results: list[Result] = []
    for name in options.only or TOPICS:
        topic, rounds, few = TOPICS[name]
        start = time.perf_counter()
        results += topic(few if options.quick else rounds)
        print(f"{name}: measured in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        if options.json:
            options.json.write_text(json.dumps([r.record() for r in results], indent=2) + "\n")
    measure.show(results)
    return int(options.check and any(r.passed is False for r in results))


if __name__ == "__main__":
    sys.exit(main())
