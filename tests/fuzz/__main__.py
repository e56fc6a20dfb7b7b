"""`python -m tests.fuzz --minutes 10 [--seed 0]`: random programs for as long as asked.

Exit status 0 if every program agreed; 1 with the smallest program that did not, as Python that
rebuilds it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .compare import check
from .drive import Failure, sweep
from .generate import programs

FLAG = "--xla_force_host_platform_device_count"

ROUND = 50
"""Programs per hypothesis run. Each run starts afresh from a seed of its own."""


def main(argv: list[str] | None = None) -> int:
    """Runs the fuzzer; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to run (1)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (by the clock)")
    options = parser.parse_args(argv)
    if FLAG not in (flags := os.environ.get("XLA_FLAGS", "")):
        # shard_map needs devices to map over. JAX reads this when it is first asked for them.
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}=4".strip()
    seed = int(time.time()) if options.seed is None else options.seed
    console = Console()
    console.print(f"jax {jax.__version__}, {jax.device_count()} devices, seed {seed}")
    begin = time.monotonic()
    end = begin + 60 * options.minutes
    done = 0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=end - begin)

        def tick() -> None:
            nonlocal done
            done += 1
            now = time.monotonic()
            rate = done / max(now - begin, 1e-9)
            progress.update(
                task,
                completed=now - begin,
                description=f"{done} programs, {rate:.1f}/s, seed {seed}",
            )

        try:
            while time.monotonic() < end:
                strategy = programs(devices=jax.device_count())
                sweep(check, strategy, examples=ROUND, seed=seed, tick=tick, end=end)
                seed += 1
        except Failure as failure:
            progress.stop()
            console.print(f"mismatch after {done} programs, seed {seed}", style="bold red")
            print(failure.report())
            return 1
    elapsed = time.monotonic() - begin
    console.print(
        f"{done} programs agreed in {elapsed:.0f} s; next seed {seed}", style="bold green"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
