"""The payload of a `ResidualTable`: the size of each value kept for the backward pass."""

from __future__ import annotations

from collections import Counter
from typing import cast

import numpy as np

from tapax._results.residual import Residual
from tapax._results.residual_table import ResidualTable
from tapax._sites import Site
from tapax.viewer._blobs import Blobs
from tapax.viewer._format import Of, Subject, empty_subject
from tapax.viewer._matrices import add_statistics
from tapax.viewer._site_columns import SiteRow, Sources, make_site_columns


def add_residual_table(table: ResidualTable, name: str, blobs: Blobs, sources: Sources) -> Subject:
    """Make the subject of a table of residuals, largest first."""
    rows = _make_rows([*table])
    subject = empty_subject("sites", name)
    subject["sites"] = make_site_columns(rows, sources)
    kept = {"kept bytes": [r.kept for r in table]}
    if table.policy is not None:
        kept[f"bytes kept by {table.policy}"] = [bool(r.kept_by_policy) for r in table]
    sites = np.arange(len(rows), dtype=np.int32)
    nbytes = np.array([row.nbytes for row in rows], np.float32)
    found: dict[tuple[Of, str], tuple[np.ndarray, np.ndarray]] = {
        ("", stat): (sites, (nbytes * flags)[:, None]) for stat, flags in kept.items() if rows
    }
    subject["statistics"] = [
        {**statistic, "unit": "bytes"} for statistic in add_statistics(blobs, found, len(rows))
    ]
    text = f"{len(table)} values, {table.nbytes:,} bytes, are kept for the backward pass."
    subject["messages"] = [{"level": "info", "text": text}]
    return cast(Subject, subject)


def _make_rows(residuals: list[Residual]) -> list[SiteRow]:
    """Make a row for each residual; a number distinguishes residuals of one site and operation."""
    seen: Counter[str] = Counter()
    rows = []
    for residual in residuals:
        path = "/".join(part for part in (residual.site, residual.operation) if part)
        name = f"{path}@{seen[path]}" if seen[path] else path
        seen[path] += 1
        site = Site(path, source=residual.source, loops=residual.loops, op=residual.operation)
        dtype = str(residual.dtype)
        rows.append(SiteRow(name, site, (), residual.shape, dtype, residual.nbytes))
    return rows
