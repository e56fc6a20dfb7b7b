"""Run the tests on several Pythons and versions of jax.

    python scripts/matrix.py            every supported Python found, every jax tested on it
    python scripts/matrix.py --default  the default Python, and the newest one if it is newer

The whole matrix runs every combination without settings, every jax a second time with
`jax_enable_x64` on its newest Python, and the newest jax with `jax_enable_checks`. Tests marked
`once` and `many` run only in the newest combination. At the end the script prints a table of the
results, including the combinations that could not run. The exit status is 1 if a test failed, or if
nothing could run on a Python of the machine.

XLA compiles without LLVM's optimisations, which takes a quarter less time. Only the newest
combination of the whole matrix compiles with the default options, as users do. JAX keeps compiled
programs in `.venv/compiled`, for the next run and for other Pythons with the same jax.

With `--default` each Python runs the tests once, without those marked `many`. Tests marked `once`
run only on the last Python. A combination that cannot be installed is a failure.

Arguments after `--` go to pytest. It is a failure if they select no test in any combination.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import NamedTuple

from environment import ROOT, EnvironmentFailed, default_python, jax_versions, make
from pythons import SUPPORTED, Python, find

PLAIN: dict[str, str] = {}
X64 = {"JAX_ENABLE_X64": "1"}
CHECKS = {"JAX_ENABLE_CHECKS": "1"}
QUICK_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
OLDER_COMPILATION = {"0.10.2": " --xla_cpu_use_fusion_emitters=false"}
"""More flags for quick compilation, which the XLA of later versions of jax does not know."""
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".venv" / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
CACHE_RACE = "ignore:Error reading persistent compilation cache entry"
"""JAX warns if it reads an entry that another process still writes, and compiles instead."""

PASSED, NOT_INSTALLED, NO_TEST = "passed", "could not be installed", "no test selected"
NO_TEST_CODE = 5
"""The exit status of pytest if it selects no test."""


class Row(NamedTuple):
    """The result of the tests in one combination of Python, jax and settings."""

    python: str
    jax: str
    settings: str
    result: str
    seconds: float

    @property
    def failed(self) -> bool:
        return self.result.startswith("FAILED")


def run_tests(
    python: Python, jax: str, settings: dict[str, str], arguments: list[str], *, quick: bool = True
) -> Row:
    """Run pytest in one environment under the given JAX settings, and pass its output through."""
    shown = " ".join(f"{key}={value}" for key, value in settings.items()) or "-"
    print(f"\nPython {python.name}, jax {jax}, settings {shown}", flush=True)
    start = time.monotonic()
    try:
        inner = make(python, jax)
    except EnvironmentFailed as error:
        print(error, file=sys.stderr)
        return Row(python.name, jax, shown, NOT_INSTALLED, time.monotonic() - start)
    # A setting in the caller's shell must not change the run without settings.
    unset = {*X64, *CHECKS}
    environ = {key: value for key, value in os.environ.items() if key not in unset}
    flags = QUICK_COMPILATION + OLDER_COMPILATION.get(jax, "") if quick else ""
    environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {flags}".strip()
    done = subprocess.run(
        [str(inner), "-m", "pytest", "-n", "2", "-W", CACHE_RACE, *arguments],
        cwd=ROOT,
        env={"PYTHONWARNINGS": CACHE_RACE} | CACHE | environ | settings,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    results = {0: PASSED, NO_TEST_CODE: NO_TEST}
    result = results.get(done.returncode, f"FAILED (pytest exit {done.returncode})")
    return Row(python.name, jax, shown, result, time.monotonic() - start)


def run_default(arguments: list[str]) -> int:
    """Run the tests on the default Python and on a newer one; return the exit status."""
    first = default_python()
    pythons = [first]
    found = find()
    if found and max(found) > first.minor:
        pythons.append(found[max(found)])
    rows = []
    for python in pythons:
        some = "not many" if python is pythons[-1] else "not many and not once"
        asked = ["-m", some, *arguments]
        rows.append(run_tests(python, jax_versions(python)[-1], PLAIN, asked))
    bad = [row for row in rows if row.failed or row.result == NOT_INSTALLED]
    if all(row.result == NO_TEST for row in rows):
        bad = rows
    for row in bad:
        print(f"Python {row.python}, jax {row.jax}: {row.result}", file=sys.stderr)
    return 1 if bad else 0


def run_matrix(arguments: list[str]) -> int:
    """Run the tests in every combination, and print a table; return the exit status."""
    found = find()
    rows = []
    newest = {jax: python for python in found.values() for jax in jax_versions(python)}
    for minor, python in found.items():
        versions = jax_versions(python)
        for jax in versions:
            last = minor == max(found) and jax == versions[-1]
            settings = [PLAIN, *([X64] if python == newest[jax] else []), *([CHECKS] * last)]
            for setting in settings:
                if last and setting is PLAIN:
                    rows.append(run_tests(python, jax, setting, arguments, quick=False))
                else:
                    some = ["-m", "not many and not once", *arguments]
                    rows.append(run_tests(python, jax, setting, some))
                if rows[-1].result == NOT_INSTALLED:
                    break
    print_table(rows)
    for minor in SUPPORTED:
        if minor not in found:
            print(
                f"Python {minor[0]}.{minor[1]} was not found on this machine, so no test ran on it."
            )
    empty = {python.name for python in found.values()} - {
        row.python for row in rows if row.result != NOT_INSTALLED
    }
    for name in sorted(empty):
        print(f"Python {name} was found, but no jax could be installed on it.")
    idle = all(row.result == NO_TEST for row in rows)
    return 1 if empty or idle or any(row.failed for row in rows) else 0


def print_table(rows: list[Row]) -> None:
    print(f"\n{'python':<8}{'jax':<10}{'settings':<21}{'seconds':>8}  result")
    for row in rows:
        print(f"{row.python:<8}{row.jax:<10}{row.settings:<21}{row.seconds:>8.0f}  {row.result}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests on several Pythons and jax.")
    parser.add_argument(
        "--default", action="store_true", help="only the default and the newest Python"
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    chosen = parser.parse_args()
    try:
        return run_default(chosen.pytest) if chosen.default else run_matrix(chosen.pytest)
    except EnvironmentFailed as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
