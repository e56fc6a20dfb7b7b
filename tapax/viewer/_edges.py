"""Edges of the graph of modules: the flow of data between the rows of a subject.

A site has a row for each iteration of its loops, and edges join the first rows. If a capture
selected single layers of scanned layers, each of these has a row: `Stack/layers/3/mlp`. Edges then
join the rows of one layer, and through the carry those of a layer and the next. Data from outside
enter the first layer, and leave the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

from tapax._results.flow import Flow
from tapax.viewer._format import Edge

_ITERATION = re.compile(r"\[\d+(?:,\d+)*\]$")
_LAYER = re.compile(r"/(\d+)(?=[/.:@~]|$)")

_Rows = Mapping[int, int]
"""The row of each layer; -1 stands for a site without numbered layers."""


class FlowFields(TypedDict):
    """The fields of a subject with its flow of data."""

    edges: Sequence[Edge]
    limited: Sequence[int]


def make_edges(flow: Flow, names: Sequence[str]) -> FlowFields:
    """Make the edges between the rows of a subject, which have these names."""
    known = {site.name for site in flow.sites}
    rows: dict[str, dict[int, int]] = {}
    for row, name in enumerate(names):
        site, layer = _find_site(_ITERATION.sub("", name), known)
        rows.setdefault(site, {}).setdefault(layer, row)
    part = flow.between(rows)
    edges: dict[tuple[int, int], Edge] = {}
    for source, target in part.edges:
        a, b = part.sites[source], part.sites[target]
        for start, end, back in _join(rows[a.name], rows[b.name], source >= target):
            edges.setdefault(
                (start, end),
                {"from": start, "to": end, "shape": a.shape, "dtype": a.dtype, "back": back},
            )
    limited = {row for i in part.limited for row in rows[part.sites[i].name].values()}
    return {"edges": list(edges.values()), "limited": sorted(limited)}


def _find_site(name: str, known: set[str]) -> tuple[str, int]:
    """Return the name of the site of a row, and the number of its layer or -1."""
    if name not in known:
        for found in _LAYER.finditer(name):
            whole = name[: found.start()] + name[found.end() :]
            if whole in known:
                return whole, int(found[1])
    return name, -1


def _join(sources: _Rows, targets: _Rows, back: bool) -> Iterator[tuple[int, int, bool]]:
    """Yield the rows that an edge between two sites joins, and whether it goes back."""
    if -1 in sources or -1 in targets:
        yield sources.get(-1, sources[max(sources)]), targets.get(-1, targets[min(targets)]), back
        return
    for layer, row in sources.items():
        if layer + back in targets:
            yield row, targets[layer + back], False
