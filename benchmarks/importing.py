"""The time of `import tapax`, over that of `import jax`, each in a new process."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.measure import Result

CODE = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"


def import_seconds(package: str) -> float:
    """Return the processor time that a new process takes to import a package."""
    command = [sys.executable, "-c", CODE.format(package)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def over_jax(rounds: int) -> list[Result]:
    """Import both packages alternately; the first round fills the caches of bytecode."""
    packages = ("tapax", "jax")
    times: dict[str, list[float]] = {package: [] for package in packages}
    for _ in range(rounds + 1):
        for package in packages:
            times[package].append(import_seconds(package))
    times = {package: seconds[1:] for package, seconds in times.items()}
    return [Result.timed("import", "time, over import jax", times, "tapax", "jax", bar=1.15)]
