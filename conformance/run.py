"""Run every case through every library, and write `docs/conformance.md`.

python -m conformance.run [--check] [--only COLUMN] [--case NAME] [--output PATH]
"""

from __future__ import annotations

import os

# Meshes need two devices; the figures of other platforms are no figures of the libraries.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
).strip()

import argparse
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.progress import track

from conformance import report
from conformance.columns import COLUMNS, Verdict
from conformance.problem import CASES

DOCUMENT = Path(__file__).parent.parent / "docs" / "conformance.md"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.run", description="One table of what works where."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 unless all of tapax works"
    )
    parser.add_argument("--only", action="append", choices=COLUMNS, help="this column; repeatable")
    parser.add_argument("--case", action="append", help="this case; repeatable")
    parser.add_argument("--output", type=Path, default=DOCUMENT, metavar="PATH")
    options = parser.parse_args()

    columns = options.only or list(COLUMNS)
    if options.check and not options.only:
        columns = [name for name in COLUMNS if name.startswith("tapax")]
    cases = [case for case in CASES if not options.case or case.name in options.case]
    console = Console(stderr=True)
    results: dict[tuple[str, str, str], Verdict] = {}
    for name in columns:
        for case in track(cases, name, console=console):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdicts = COLUMNS[name](case)
            for what, verdict in zip(("value", "gradient"), verdicts, strict=True):
                results[name, case.name, what] = verdict
                if name.startswith("tapax") and verdict.bad:
                    console.print(f"{name}: {case.name}, {what}: {verdict.mark}: {verdict.why}")
    bad = [key for key, verdict in results.items() if key[0].startswith("tapax") and verdict.bad]
    whole = len(columns) == len(COLUMNS) and len(cases) == len(CASES)
    if whole and not options.check:
        options.output.write_text(report.document(results))
        console.print(f"Written: {os.path.relpath(options.output)}")
    else:
        console.print(report.table(results, columns, cases))
    return int(options.check and bool(bad))


if __name__ == "__main__":
    sys.exit(main())
