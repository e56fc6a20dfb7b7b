"""All cases through one library, in this process."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.progress import track

from conformance.cases import CASES
from conformance.library import judge, load


def measure(where: str, cases: list[str] | None = None, title: str = "") -> dict[str, Any]:
    """Judge the library at `module:attribute`; return its versions and its verdicts by case."""
    library = load(where)
    found = {}
    chosen = [case for case in CASES if not cases or case.name in cases]
    for case in track(chosen, title or library.name, console=Console(stderr=True)):
        verdicts = judge(library, case)
        found[case.name] = [[v.mark, v.why] if v.why else [v.mark] for v in verdicts]
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    versions |= {package: version(package) for package in library.packages}
    return {"versions": versions, "verdicts": found}
