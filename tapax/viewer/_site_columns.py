"""The sites of a subject as columns, and the source files that they name."""

from __future__ import annotations

import dataclasses
import linecache
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from tapax._results.source_names import name_cell
from tapax._sites import Site, split_row
from tapax._sites.roles import place_rows
from tapax.viewer._blobs import Blobs
from tapax.viewer._format import Line, SiteColumns, SourceFile

LARGEST_SOURCE = 2**20
"""The size above which a source file is not read, since it is generated code."""


@dataclasses.dataclass(frozen=True)
class SiteRow:
    """A site, or one iteration of a site in a loop, as the page lists it.

    `site` is None if only the name of the site is known, as in a log.
    """

    name: str
    site: Site | None = None
    iteration: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    nbytes: int = 0
    conditional: bool = False


class Sources:
    """The source files of sites, each read once."""

    def __init__(self, blobs: Blobs):
        self.files: list[SourceFile] = []
        self._blobs = blobs
        self._numbers: dict[str, int] = {}

    def locate(self, source: str) -> Line | None:
        """Return the number of the file and the line of `source`; read each file at first use."""
        path, _, line = source.rpartition(":")
        if not path or not line.isdigit():
            return None
        if path not in self._numbers:
            self._numbers[path] = len(self.files)
            cell = name_cell(path)
            # The text of a cell is in memory alone.
            text = _read_source(path) if cell is None else "".join(linecache.getlines(path)) or None
            column = None if text is None else self._blobs.add_text(text)
            self.files.append({"path": path if cell is None else cell, "text": column})
        return self._numbers[path], int(line)


def _read_source(path: str) -> str | None:
    """Read a Python file, or return None if it cannot be read or is not a Python file."""
    if not path.endswith(".py"):
        return None
    try:
        if os.path.getsize(path) > LARGEST_SOURCE:
            return None
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def make_site_columns(rows: Sequence[SiteRow], sources: Sources) -> SiteColumns:
    """Make the columns of sites, in the order of `rows`."""
    places = place_rows(row.name for row in rows)
    parsed = [split_row(row.name) for row in rows]
    columns: dict[str, Any] = {
        "name": [row.name for row in rows],
        "path": [path for path, _, _, _ in parsed],
        "role": [places[row.name].role for row in rows],
        "stack": [places[row.name].stack for row in rows],
        "depth": [list(places[row.name].depth) for row in rows],
    }
    sites = [row.site or Site("") for row in rows]
    known: Mapping[str, Iterable[Any]] = {
        "call": (call for _, call, _, _ in parsed),
        "pullback": (pullback for _, _, pullback, _ in parsed),
        "iteration": (list(iteration) for _, _, _, iteration in parsed),
        "kind": (row.site.kind if row.site else "" for row in rows),
        "shape": (None if row.shape is None else list(row.shape) for row in rows),
        "dtype": (row.dtype for row in rows),
        "nbytes": (row.nbytes for row in rows),
        "source": (sources.locate(site.source) for site in sites),
        "loops": (list(site.loops) for site in sites),
        "module": (_class_name(site.module) for site in sites),
        "method": (site.method for site in sites),
        "op": (site.op for site in sites),
        "conditional": (row.conditional for row in rows),
    }
    for name, entries in known.items():
        column = list(entries)
        if any(entry is not None and entry != [] and bool(entry) for entry in column):
            columns[name] = column
    return cast(SiteColumns, columns)


def _class_name(module: type | str | None) -> str:
    return module if isinstance(module, str) else "" if module is None else module.__qualname__
