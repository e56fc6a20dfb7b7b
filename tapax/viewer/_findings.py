"""The payload of a `Finding`: one site, and an event that describes the first bad value."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from tapax._sites import Site
from tapax.nonfinite._finding import Finding
from tapax.viewer._format import Event, Subject, empty_subject
from tapax.viewer._site_columns import SiteRow, Sources, make_site_columns


def add_finding(finding: Finding, name: str, sources: Sources) -> Subject:
    """Make the subject of a finding."""
    path = finding.path or finding.operation
    site = Site(path, source=finding.source)
    dtype = np.dtype(finding.dtype)
    nbytes = int(np.prod(finding.shape, dtype=np.int64)) * dtype.itemsize
    row = SiteRow(path, site, (), finding.shape, dtype.name, nbytes)
    event: Event = {
        "kind": "finding",
        "step": None,
        "site": 0,
        "siteName": path,
        "message": str(finding).splitlines()[0],
        "operation": finding.operation,
        "phase": finding.phase,
        "iterations": [*zip(finding.loops, finding.iterations, strict=True)],
        "examples": [*zip(finding.mapped, finding.examples, strict=True)],
        "device": [*finding.device.items()],
        "index": list(finding.index),
        "count": finding.count,
        "shape": list(finding.shape),
        "dtype": dtype.name,
        "operands": [
            {"label": f"operand {i}", "type": _type_name(x.dtype, x.shape), "text": str(x)}
            for i, x in enumerate(finding.operands)
        ],
        "source": sources.locate(finding.source),
    }
    subject = empty_subject("finding", name)
    subject["sites"] = make_site_columns([row], sources)
    subject["events"] = [event]
    return cast(Subject, subject)


def _type_name(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"
