"""The payload of a `Difference`: its table, and the errors of every site and iteration."""

from __future__ import annotations

from typing import cast

import numpy as np

from tapax._results.difference import Difference, SiteDifference
from tapax._results.taps import SiteDict
from tapax.monitoring._log_format import number_to_json
from tapax.viewer._blobs import Blobs
from tapax.viewer._format import (
    DifferenceEntry,
    JsonNumber,
    Of,
    SiteDifferenceEntry,
    Subject,
    empty_subject,
)
from tapax.viewer._matrices import add_statistics, as_float32
from tapax.viewer._site_columns import SiteRow, Sources, make_site_columns

STATISTIC = "ulps"
"""The statistic of a difference: the largest error of a site in ulps (units in the last place)."""


def add_difference(difference: Difference, name: str, blobs: Blobs, sources: Sources) -> Subject:
    """Make the subject of a difference."""
    sites: dict[str, int] = {}
    numbers: dict[Of, dict[int, float]] = {"value": {}, "grad": {}}
    by_kind: dict[Of, SiteDict] = {"value": difference.values, "grad": difference.grads}
    entries: list[SiteDifferenceEntry] = []
    places: dict[int, int] = {}
    for site in dict.fromkeys([*difference.values, *difference.grads]):
        for of, found in by_kind.items():
            if site in found:
                each = found[site]
                for row, ulps in _split_errors(each):
                    numbers[of][sites.setdefault(row, len(sites))] = ulps
                places[id(each)] = len(entries)
                entries.append(_make_entry(each, sites[_row_name(each)]))
    subject = empty_subject("difference", name)
    subject["sites"] = make_site_columns([SiteRow(row) for row in sites], sources)
    found_numbers: dict[tuple[Of, str], tuple[np.ndarray, np.ndarray]] = {
        (of, STATISTIC): (
            np.array(sorted(by_site), np.int32),
            np.array([[as_float32(by_site[i])] for i in sorted(by_site)], np.float32),
        )
        for of, by_site in numbers.items()
        if by_site
    }
    subject["statistics"] = add_statistics(blobs, found_numbers, len(sites))
    entry: DifferenceEntry = {
        "a": "a",
        "b": "b",
        "tolerance": str(difference.tolerance),
        "entries": entries,
        "first": None if difference.first is None else places[id(difference.first)],
        "firstGrad": None if difference.first_grad is None else places[id(difference.first_grad)],
        "onlyA": list(difference.only_a),
        "onlyB": list(difference.only_b),
    }
    subject["difference"] = entry
    return cast(Subject, subject)


def _split_errors(each: SiteDifference) -> list[tuple[str, float]]:
    """Return the error of each iteration, by the name of its row.

    The error is infinite if the two arrays cannot be compared.
    """
    errors = each.ulps_by_iteration
    if each.reason:
        return [(_row_name(each), float("inf"))]
    if not errors.ndim or not errors.size:
        return [(each.name, each.ulps)]
    return [
        (f"{each.name}[{','.join(map(str, place))}]", float(errors[place]))
        for place in np.ndindex(errors.shape)
    ]


def _row_name(each: SiteDifference) -> str:
    """Name the row of the first iteration that differs, or of iteration 0 if all are equal.

    A loop without iterations has one row, as a site outside of loops has.
    """
    errors = each.ulps_by_iteration
    axes = 0 if each.reason or not errors.size else errors.ndim
    place = each.iteration or (0,) * axes
    return f"{each.name}[{','.join(map(str, place))}]" if place else each.name


def _make_entry(each: SiteDifference, site: int) -> SiteDifferenceEntry:
    absolute, relative, ulps = (
        cast(JsonNumber, number_to_json(x)) for x in (each.absolute, each.relative, each.ulps)
    )
    return {
        "site": site,
        "otherName": each.other_name,
        "of": "grad" if each.kind == "grad" else "value",
        "types": each.types,
        "differs": bool(each.differs),
        "reason": each.reason,
        "absolute": absolute,
        "relative": relative,
        "ulps": ulps,
        "index": None if each.index is None else [int(i) for i in each.index],
        "iteration": [int(i) for i in each.iteration],
        "sentence": str(each),
    }
