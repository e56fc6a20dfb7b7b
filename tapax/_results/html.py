"""HTML of a table for notebooks: a foldable tree of modules with aligned numbers.

The HTML needs no scripts and no other files. It takes the colours of text and background from the
notebook, light or dark, and adds translucent ones.
"""

from __future__ import annotations

import collections
import dataclasses
import html
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Column, Table

ROWS = 2000
"""The largest number of rows in a table."""
_OPEN_ROWS = 40
"""The largest number of rows that open folders show at first."""

_STYLE = """
.tapax{font:13px/1.5 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.tapax{overflow-x:auto;margin-bottom:1em}
.tapax .title{font-weight:600;padding:.3em 0}
.tapax .row{display:grid;grid-template-columns:var(--columns);column-gap:2ch}
.tapax .row{width:max-content;white-space:pre}
.tapax .row:hover{background:color-mix(in srgb,currentColor 9%,transparent)}
.tapax .head{border-bottom:1px solid color-mix(in srgb,currentColor 40%,transparent)}
.tapax .head,.tapax small,.tapax .zero,.tapax .caption{opacity:.6}
.tapax summary{cursor:pointer;list-style:none}
.tapax summary::-webkit-details-marker{display:none}
.tapax .name::before{content:"";display:inline-block;width:2ch}
.tapax summary .name::before{content:"▸"}
.tapax details[open]>summary .name::before{content:"▾"}
.tapax .number{text-align:right}
.tapax .heat{background:color-mix(in srgb,#3b82f6 var(--heat),transparent)}
.tapax .bad{color:#dc3d43;font-weight:600}
"""


@dataclasses.dataclass
class _Folder:
    """The rows of one name, and the folders below it."""

    rows: list[Sequence[Any]] = dataclasses.field(default_factory=list)
    parts: dict[str, _Folder] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.rows) + sum(part.size for part in self.parts.values())


@dataclasses.dataclass(frozen=True)
class _Line:
    """One line of the table: its depth, its label, its cells, and the lines that it folds."""

    depth: int
    label: str
    cells: Sequence[Any]
    inside: list[_Line]
    count: int


def to_html(table: Table) -> str:
    """Convert a table to HTML.

    Slashes in the first column separate the levels of a tree. The numbers of a column with a style
    are coloured by magnitude, on a logarithmic scale; a cell with a style marks a fault.
    """
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    tree = _Folder()
    for name, *cells in rows[:ROWS]:
        folder = tree
        for part in str(name).split("/"):
            folder = folder.parts.setdefault(part, _Folder())
        folder.rows.append(cells)
    lines = list(_lines(tree, 0))
    columns = [_Column(column) for column in table.columns[1:]]
    head = _span("name", str(table.columns[0].header))
    head += "".join(_span(column.css, column.header) for column in columns)
    labels = (len(f"{x.label} ({x.count})") + 2 * x.depth for x in _all(lines))
    widths = [2 + max(labels, default=0), *(column.width for column in columns)]
    captions = [str(table.caption)] if table.caption else []
    if len(rows) > ROWS:
        captions.append(f"The first {ROWS} of {len(rows)} rows.")
    return (
        f'<div class="tapax" style="--columns:{" ".join(f"{w}ch" for w in widths)}">'
        f"<style>{_STYLE}</style>"
        f'<div class="title">{html.escape(str(table.title))}</div>'
        f'<div class="row head">{head}</div>'
        + "".join(_to_html(line, columns, _open_depth(lines)) for line in lines)
        + "".join(f'<div class="caption">{html.escape(text)}</div>' for text in captions)
        + "</div>"
    )


def _lines(folder: _Folder, depth: int) -> Iterator[_Line]:
    for label, part in folder.parts.items():
        while not part.rows and len(part.parts) == 1:  # a folder with one folder in it
            [(below, part)] = part.parts.items()
            label = f"{label}/{below}"
        first, *others = part.rows or [()]
        inside = list(_lines(part, depth + 1))
        yield _Line(depth, label, first, inside, part.size if inside else 0)
        for cells in others:
            yield _Line(depth, label, cells, [], 0)


def _all(lines: Sequence[_Line]) -> Iterator[_Line]:
    for line in lines:
        yield line
        yield from _all(line.inside)


def _open_depth(lines: Sequence[_Line]) -> int:
    """Return the depth above which folders are open."""
    counts = collections.Counter(line.depth for line in _all(lines))
    seen = depth = 0
    while counts[depth] and (depth <= 1 or seen + counts[depth] <= _OPEN_ROWS):
        seen += counts[depth]
        depth += 1
    return depth - 1


class _Column:
    """Formats the cells of one column."""

    def __init__(self, column: Column):
        self.header = str(column.header)
        self.css = "number" if column.justify == "right" else ""
        cells = [str(cell) for cell in column.cells]
        self.width = max(map(len, [self.header, *cells]))
        numbers = [abs(x) for x in map(_number, cells) if x is not None]
        sizes = [math.log(x) for x in numbers if x and math.isfinite(x)] if column.style else []
        self._low, high = min(sizes, default=0.0), max(sizes, default=0.0)
        # Numbers of similar magnitude get similar colours.
        self._range = max(high - self._low, math.log(100)) if high > self._low else 0.0

    def to_html(self, cell: Any) -> str:
        text, css, style = str(cell), self.css, ""
        number = _number(text) if css else None
        if getattr(cell, "style", "") or (number is not None and not math.isfinite(number)):
            css += " bad"
        elif number == 0:
            css += " zero"
        elif number is not None and self._range:
            place = (math.log(abs(number)) - self._low) / self._range
            css, style = css + " heat", f"--heat:{round(5 + 45 * place)}%"
        return _span(css.strip(), text, style)


def _number(text: str) -> float | None:
    try:
        return float(text.removesuffix("*"))
    except ValueError:
        return None


def _span(css: str, text: str, style: str = "", more: str = "") -> str:
    css, style = css and f' class="{css}"', style and f' style="{style}"'
    return f"<span{css}{style}>{html.escape(text)}{more}</span>"


def _to_html(line: _Line, columns: Sequence[_Column], open_depth: int) -> str:
    count = f"<small> ({line.count})</small>" if line.inside else ""
    style = f"padding-left:{2 * line.depth}ch" if line.depth else ""
    cells = _span("name", line.label, style, count)
    cells += "".join(c.to_html(x) for c, x in zip(columns, line.cells, strict=False))
    if not line.inside:
        return f'<div class="row">{cells}</div>'
    inside = "".join(_to_html(each, columns, open_depth) for each in line.inside)
    is_open = " open" if line.depth < open_depth else ""
    return f'<details{is_open}><summary class="row">{cells}</summary>{inside}</details>'
