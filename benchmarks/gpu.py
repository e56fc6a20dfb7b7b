"""Train steps at the size of a GPU: 12 layers of width 1024, 8 x 1024 tokens, bfloat16.

The topic `statistics` has 24 layers of width 2048, which are 1.27 billion parameters. The topic
`monitor-each` has 24 layers of width 1024, with 336 statistics.

    PYTHONPATH=. python -m benchmarks.gpu [--only NAME] [--json PATH]

It needs jax, and flax for the topics of NNX; without rich the table is plain text. It prints and
writes the results after each topic, so that an interrupted run keeps its finished topics.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import changes, datasets, measure, statistics, step, watching
from benchmarks.gpt import Config
from benchmarks.measure import Result

SIZE = Config(width=1024, heads=16, length=1024, batch=8, vocab=8192, dtype=jnp.bfloat16)
LARGE = Config(
    layers=24, width=2048, heads=16, length=1024, batch=8, vocab=16384, dtype=jnp.bfloat16
)
TINY = Config(layers=2, width=32, length=32, batch=2, vocab=32, dtype=jnp.bfloat16)


def nnx(function: str) -> Callable[[Config, int], list[Result]]:
    """Make a topic that imports flax only when it runs."""

    def topic(cfg: Config, rounds: int) -> list[Result]:
        return getattr(import_module("benchmarks.nnx_step"), function)(cfg, rounds)

    return topic


TOPICS = {
    "step": step.unrolled,
    "remat": step.remat,
    "idle": step.idle,
    "edit": changes.edited,
    "grad": changes.gradient,
    "prefix": changes.prefix,
    "reduce": lambda cfg, rounds: watching.reduced(cfg, rounds, bar=1.02),
    "statistics": lambda cfg, rounds: statistics.measured(
        LARGE if cfg is SIZE else cfg, rounds, histogram=(1.12, 1.15), rms=1.04
    ),
    "monitor": lambda cfg, rounds: watching.monitored(cfg, max(rounds // 10, 1)),
    "monitor-each": lambda cfg, rounds: watching.monitored_each(
        replace(cfg, layers=24) if cfg is SIZE else cfg, max(rounds // 4, 1)
    ),
    "nonfinite": watching.searched,
    "nonfinite-found": lambda cfg, rounds: watching.found(cfg, max(rounds // 10, 1)),
    "dataset": lambda cfg, rounds: datasets.harvested(
        LARGE if cfg is SIZE else cfg, max(rounds // 10, 1)
    ),
    "dataset-train": lambda cfg, rounds: datasets.trained(
        LARGE if cfg is SIZE else cfg, max(rounds // 10, 1)
    ),
    "nnx": nnx("unrolled"),
    "nnx-remat": nnx("remat"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Speed and memory of tapax."
    )
    parser.add_argument("--only", action="append", choices=TOPICS, help="this topic; repeatable")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument(
        "--tiny", action="store_true", help="a toy size, to try the script anywhere"
    )
    options = parser.parse_args()
    cfg = TINY if options.tiny else SIZE

    results: list[Result] = []
    for name in options.only or TOPICS:
        start = time.perf_counter()
        found = TOPICS[name](cfg, options.rounds)
        results += found
        print(f"\n{name}, {time.perf_counter() - start:.0f} s", flush=True)
        measure.show(found)
        if options.json:
            report = {
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "config": {**vars(cfg), "dtype": jnp.dtype(cfg.dtype).name},
                "results": [r.record() for r in results],
            }
            options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
