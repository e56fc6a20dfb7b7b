"""`python -m tests.fuzz --minutes 10 [--seed 0] [--only edits cuts]` checks random programs.

The checks take turns. The exit status is 0 if every program agreed. Otherwise it is 1, and the
command prints the smallest failing program as Python that rebuilds it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import warnings
from functools import partial

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .compare import check
from .cuts import check_cuts
from .drive import Failure, sweep
from .edits import check_edits, check_no_edit
from .generate import edited, losses, programs, selected
from .nonfinite import check_nonfinite
from .perturb import check_perturbed
from .reductions import check_reductions
from .selections import check_selections

FLAGS = {
    # shard_map needs several devices. JAX reads this when it first lists them.
    "--xla_force_host_platform_device_count": 4,
    # Compilation takes most of the time.
    "--xla_backend_optimization_level": 0,
    "--xla_llvm_disable_expensive_passes": True,
    "--xla_cpu_parallel_codegen_split_count": 1,
    # The XLA of later versions has no other emitters, and does not know the flag.
    **({"--xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),
}
"""The flags of XLA, unless the environment sets others."""

ROUND = 50
"""Programs per hypothesis run. Each run starts afresh from a seed of its own."""

CHECKS = {
    "captures": (check, programs),
    "edits": (check_edits, edited),
    "nothing": (check_no_edit, programs),
    "perturbations": (check_perturbed, losses),
    "cuts": (check_cuts, programs),
    "reductions": (check_reductions, programs),
    "nonfinite": (check_nonfinite, programs),
    "selections": (check_selections, selected),
    "parts": (check_edits, partial(edited, parts=True)),
}
"""The checks, and their programs."""


def main(argv: list[str] | None = None) -> int:
    """Run the fuzzer and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to run (1)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (by the clock)")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="what")
    options = parser.parse_args(argv)
    given = os.environ.get("XLA_FLAGS", "")
    added = (f"{flag}={value}" for flag, value in FLAGS.items() if flag not in given)
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()
    warnings.filterwarnings("ignore", "The function has no sites")
    # Most objects live as long as the process, so collect garbage rarely.
    gc.freeze()
    gc.set_threshold(100_000, 20)
    seed = int(time.time()) if options.seed is None else options.seed
    console = Console()
    console.print(f"jax {jax.__version__}, {jax.device_count()} devices, seed {seed}")
    begin = time.monotonic()
    end = begin + 60 * options.minutes
    done, name = 0, ""
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
                description=f"{name}: {done} programs, {rate:.1f}/s, seed {seed}",
            )

        try:
            while time.monotonic() < end:
                name = options.only[seed % len(options.only)]
                checked, strategy = CHECKS[name]
                drawn = strategy(devices=jax.device_count())
                sweep(checked, drawn, examples=ROUND, seed=seed, tick=tick, end=end)
                seed += 1
        except Failure as failure:
            progress.stop()
            console.print(f"{name}: mismatch after {done} programs, seed {seed}", style="bold red")
            print(failure.report())
            return 1
    elapsed = time.monotonic() - begin
    console.print(
        f"{done} programs agreed in {elapsed:.0f} s; next seed {seed}", style="bold green"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
