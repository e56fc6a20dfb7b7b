"""Run every case through every library, and write the tables of `docs/conformance.md`.

    python -m conformance.run                               every column
    python -m conformance.run --only jax-tap --only penzai  some columns; the others stay
    python -m conformance.run --check                       tapax alone; writes nothing
    python -m conformance.run --library mymodule:LIBRARY    a library of your own
    python -m conformance.run --render                      the tables, from docs/conformance.json

Each column runs in a process, with the Python of its environment, so that the version of JAX that
one library needs does not affect the others.
"""

from __future__ import annotations

import os

# Meshes need two devices, and CPU results are the same everywhere.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_TRACEBACK_FILTERING"] = "off"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
).strip()

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from conformance import report
from conformance.columns import COLUMNS, ROOT, Column, python_of
from conformance.library import ERROR, PARTS, WRONG, load
from conformance.measure import measure

DATA = ROOT / "docs" / "conformance.json"
PAGE = ROOT / "docs" / "conformance.md"
console = Console(stderr=True)


def measure_apart(column: Column, cases: list[str] | None) -> dict[str, Any]:
    """Judge a library in a process of its environment."""
    python = python_of(column.environment) if column.environment else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "results.json")
        command = [python, "-m", "conformance.run", "--library", column.library]
        command += ["--title", column.name, "--results", str(output)]
        command += [part for case in cases or () for part in ("--case", case)]
        subprocess.run(command, cwd=ROOT, check=True)
        return json.loads(output.read_text())


def main() -> int:
    names = [column.name for column in COLUMNS]
    parser = argparse.ArgumentParser(
        prog="python -m conformance.run", description="Judge libraries; write the tables."
    )
    parser.add_argument("--only", action="append", choices=names, help="this column; repeatable")
    parser.add_argument("--case", action="append", help="this case, writing nothing; repeatable")
    parser.add_argument("--library", metavar="MODULE:NAME", help="judge this library, and print")
    parser.add_argument("--results", type=Path, help="with --library: write the verdicts as JSON")
    parser.add_argument("--title", default="", help=argparse.SUPPRESS)
    parser.add_argument("--render", action="store_true", help="write the tables, measure nothing")
    parser.add_argument(
        "--check",
        action="store_true",
        help="judge tapax, write nothing; exit with 1 unless its marks are those on the page",
    )
    options = parser.parse_args()
    sys.path.insert(0, os.getcwd())

    if options.library:
        found = measure(options.library, options.case, options.title)
        if options.results:
            options.results.write_text(json.dumps(found))
        else:
            title = load(options.library).name
            Console().print(report.table({title: found}))
            Console().print(report.reasons(found))
        return 0

    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    if not options.render:
        chosen = [c for c in COLUMNS if not options.only or c.name in options.only]
        if options.check:
            chosen = [c for c in chosen if c.group == "tapax"]
        results = {c.name: measure_apart(c, options.case) for c in chosen}
        if options.check or options.case:
            console.print(report.table(results))
            return int(options.check and _differs(results, data))
        data |= results
        data = {name: data[name] for name in names if name in data}
        DATA.write_text(report.dump(data))
    PAGE.write_text(report.render(PAGE.read_text(), data))
    console.print(f"Written: {os.path.relpath(PAGE)}")
    return 0


def _differs(results: dict[str, Any], data: dict[str, Any]) -> bool:
    """Print the marks of tapax that are not those on the page; return whether there are any."""
    differ = False
    for name, result in results.items():
        for case, verdicts in result["verdicts"].items():
            known = data.get(name, {}).get("verdicts", {}).get(case)
            for what, now, then in zip(PARTS, verdicts, known or [["new"]] * 2, strict=True):
                if now[0] != then[0] and (now[0] in (ERROR, WRONG) or known):
                    console.print(f"{name}: {case}, {what}: {then[0]} on the page, now {now}")
                    differ = True
    return differ


if __name__ == "__main__":
    sys.exit(main())
