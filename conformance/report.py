"""The document: versions, a table of values and one of gradients, and the reason of every fault."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from rich.table import Table

from conformance.columns import COLUMNS, Verdict
from conformance.problem import CASES, Case

Results = Mapping[tuple[str, str, str], Verdict]
PACKAGES = ("jax", "flax", "equinox", "dm-haiku", "brainstate", "keras", "penzai")
MARKS = ("works", "error", "silently wrong", "none")

HEAD = """\
# Who sees what: the same programs, through several libraries

Every case below is one small program, written in each framework. A library is asked for the value
that a layer returned, and for the gradient that flowed back into it. Both are compared with a
reference in plain `jax.numpy`, which runs one operation at a time and takes the gradient with
respect to a zero added by hand; so are the loss, the number of calls and iterations, the type, and
the state of the model afterwards.

*works*: all of that agrees. *error*: an exception. **silently wrong**: no exception, and something
does not agree; a tracer that leaks counts as that, for nothing is raised until it is used. *none*:
there is no such thing in that library or framework. –: JAX has no gradient of it.

tapax captures the unedited step. The others are used as their documentation says: `nnx.capture`
with `sow` and `perturb` in the layer; Linen's `capture_intermediates`, `perturb` and, for layers
that nobody edits, `intercept_methods`; penzai's `SaveIntermediate`, and a layer that adds a zero,
put in by `pz.select`. If a transformation is *around the model*, they are called inside of it, and
what they return is handed out of it. In *the framework's own* transformations, what has to be
declared for them is declared, except where the case says that nothing is.

Written by `make conformance`.
"""


def document(results: Results) -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    parts = [HEAD, f"Python {'.'.join(platform.python_version_tuple()[:2])}, {versions}; CPU.\n"]
    parts += ["## In short\n", _summary(results)]
    parts += ["## Values\n", _table(results, "value")]
    parts += ["## Gradients\n", _table(results, "gradient")]
    parts += ["## What went wrong\n", _reasons(results)]
    return "\n".join(parts)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(map(_row, [head, ["---"] * len(head), *rows]))


def _shown(mark: str) -> str:
    return f"**{mark}**" if mark == "silently wrong" else mark


def _summary(results: Results) -> str:
    rows = []
    for column in COLUMNS:
        marks = Counter(verdict.mark for key, verdict in results.items() if key[0] == column)
        rows.append([column, *(str(marks[mark]) for mark in MARKS)])
    return _grid(["", *MARKS], rows)


def _table(results: Results, what: str) -> str:
    rows = [
        [case.title, *(_shown(results[column, case.name, what].mark) for column in COLUMNS)]
        for case in CASES
    ]
    return _grid(["case", *COLUMNS], rows)


def _reasons(results: Results) -> str:
    parts = []
    for column in COLUMNS:
        rows = [
            [case.title, what, verdict.mark, verdict.why.replace("|", "\\|")]
            for case in CASES
            for what in ("value", "gradient")
            if (verdict := results[column, case.name, what]).bad
        ]
        if rows:
            parts.append(f"### {column}\n\n" + _grid(["case", "of", "", "what happened"], rows))
    return "\n".join(parts) if parts else "Nothing.\n"


def table(results: Results, columns: Sequence[str], cases: Sequence[Case]) -> Table:
    """A part of the results, for the terminal."""
    shown = Table("case", *columns)
    for case in cases:
        pairs = [[results[c, case.name, w].mark for w in ("value", "gradient")] for c in columns]
        shown.add_row(case.title, *(" / ".join(dict.fromkeys(pair)) for pair in pairs))
    return shown
