"""Races against JAX libraries, in the environment that contains them and tapax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Result

ROOT = Path(__file__).resolve().parent.parent


def raced(module: str, rounds: int) -> list[Result]:
    """Run `python -m benchmarks.peers.<module> ROUNDS` there; return its results."""
    made = [sys.executable, str(ROOT / "scripts" / "environment.py"), "--jax-peers"]
    python = subprocess.run(made, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    command = [python, "-m", f"benchmarks.peers.{module}", str(rounds)]
    run = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    records = json.loads(run.stdout.splitlines()[-1])
    return [
        Result(**{k: v for k, v in r.items() if k in Result.__dataclass_fields__}) for r in records
    ]


def tell(results: list[Result]) -> None:
    """Print results for the process that asked for them."""
    print(json.dumps([result.record() for result in results]))
