"""The tables of `docs/conformance.md`, which are a view of `docs/conformance.json`.

The page itself is written by hand. `render` replaces the text between the markers
`<!-- begin NAME -->` and `<!-- end NAME -->`, and keeps everything else.
"""

from __future__ import annotations

import html
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from conformance.cases import CASES, SECTIONS
from conformance.columns import COLUMNS, ROOT, Column, heading
from conformance.library import ERROR, MARKS, MISSING, PARTS, REFUSES, UNDEFINED, WORKS, WRONG
from conformance.problem import Case

SIGNS = {WORKS: "✅", REFUSES: "🛑", ERROR: "💥", WRONG: "❌", MISSING: "·", UNDEFINED: "–"}
GROUPS = {"tapax": "tapax, in models of", "JAX": "other JAX libraries", "PyTorch": "PyTorch"}
EXAMPLE = ROOT / "conformance" / "example.py"
Data = dict[str, Any]


def dump(data: Data) -> str:
    """Return the data as JSON, with a line for every case."""
    columns = []
    for name, column in data.items():
        cases = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in column["verdicts"].items())
        text = ",\n".join(cases)
        head = f'{json.dumps(name)}: {{"versions": {json.dumps(column["versions"])}, "verdicts": {{'
        columns.append(f"{head}\n{text}\n}}}}")
    return "{\n" + ",\n".join(columns) + "\n}\n"


def render(page: str, data: Data) -> str:
    """Write the tables into the page."""
    columns = [column for column in COLUMNS if column.name in data]
    parts = {
        "versions": _versions(columns, data),
        "summary": _summary(columns, data),
        "tables": "\n".join(
            f"### {title}\n\n{_matrix(cases, columns, data)}" for title, cases in SECTIONS.items()
        ),
        "reasons": "\n".join(_reasons(column, data) for column in columns),
        "example": f"```python\n{EXAMPLE.read_text()}```\n",
    }
    for name, text in parts.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        if not re.search(pattern, page, re.DOTALL):
            raise ValueError(f"The page has no lines {begin.strip()!r} and {end!r}.")
        filled = f"{begin}\n{text}\n{end}".replace("\\", r"\\")
        page = re.sub(pattern, filled, page, flags=re.DOTALL)
    return page


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _versions(columns: list[Column], data: Data) -> str:
    rows = []
    for column in columns:
        versions = data[column.name]["versions"].items()
        rows.append([column.name, ", ".join(f"{name} {version}" for name, version in versions)])
    return _grid(["library", "versions"], rows)


def _summary(columns: list[Column], data: Data) -> str:
    rows = []
    for column in columns:
        verdicts = itertools.chain(*data[column.name]["verdicts"].values())
        marks = Counter(verdict[0] for verdict in verdicts)
        rows.append([column.name, *(str(marks[mark]) for mark in MARKS)])
    return _grid(["library", *(f"{SIGNS[mark]} {mark}" for mark in MARKS)], rows)


def _matrix(cases: list[Case], columns: list[Column], data: Data) -> str:
    """Return a table in HTML, since Markdown has no headings over several columns."""
    lines = ['<div style="overflow-x: auto">', '<table class="table">', "<thead>"]
    groups = [(key, len(list(group))) for key, group in itertools.groupby(c.group for c in columns)]
    heads = "".join(f'<th colspan="{count}">{GROUPS[key]}</th>' for key, count in groups)
    lines.append(f'<tr><th rowspan="2">case</th>{heads}</tr>')
    lines.append("<tr>" + "".join(f"<th>{heading(column)}</th>" for column in columns) + "</tr>")
    lines += ["</thead>", "<tbody>"]
    for case in cases:
        cells = "".join(_cell(data[column.name]["verdicts"].get(case.name)) for column in columns)
        lines.append(f"<tr><td>{html.escape(case.title)}</td>{cells}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>", "</div>", ""])


def _cell(verdicts: Any) -> str:
    """Return a cell with the signs of value and gradient; the reasons show under the mouse."""
    if verdicts is None:
        return "<td></td>"
    signs = " ".join(SIGNS[verdict[0]] for verdict in verdicts)
    if verdicts[0][0] == verdicts[1][0] == MISSING:
        signs = SIGNS[MISSING]
    texts = [f"{p}: {v[1]}" for p, v in zip(PARTS, verdicts, strict=True) if len(v) > 1]
    title = f' title="{html.escape("; ".join(texts))}"' if texts else ""
    return f'<td align="center"{title}>{signs}</td>'


def _reasons(column: Column, data: Data) -> str:
    rows = []
    for case in CASES:
        verdicts = data[column.name]["verdicts"].get(case.name, ())
        for what, (mark, *why) in zip(PARTS, verdicts, strict=False):
            if why:
                rows.append([case.title, what, f"{SIGNS[mark]} {mark}", _quote(mark, why[0])])
    if not rows:
        return ""
    table = _grid(["case", "asked for", "mark", "reason"], rows)
    count = f"{len(rows)} reason{'s' * (len(rows) > 1)}"
    return f"<details>\n<summary>{column.name}: {count}</summary>\n\n{table}\n</details>\n"


def _quote(mark: str, why: str) -> str:
    why = why.replace("|", "\\|")
    return why if mark == WRONG else "`" + why.replace("`", "'") + "`"


def table(results: Data) -> Table:
    """Return the marks of some columns, for the terminal."""
    shown = Table("case", *results)
    for case in CASES:
        verdicts = [result["verdicts"].get(case.name) for result in results.values()]
        if any(verdicts):
            marks = (" / ".join(dict.fromkeys(v[0] for v in pair)) for pair in verdicts)
            shown.add_row(case.title, *marks)
    return shown


def reasons(result: Data) -> str:
    """Return a line for every mark that has a reason, for the terminal."""
    lines = []
    for case, verdicts in result["verdicts"].items():
        for what, (mark, *why) in zip(PARTS, verdicts, strict=True):
            lines += [f"{case}, {what}: {mark}: {text}" for text in why]
    return "\n".join(lines)
