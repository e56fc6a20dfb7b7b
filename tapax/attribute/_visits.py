"""Visits: the computations of the values that a selection picks. A result has a row for each.

A program visits a site outside loops once, and a site in a scan once in every iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tapax._jax import PyTree
from tapax._results import Taps
from tapax._sites import At, Site, SiteError, StepSlice, at, check, flatten, matches


class Visit(NamedTuple):
    """One computation of a site's value; in a scan, that of the iteration `step`."""

    site: Site
    selection: Any
    step: int | None

    @property
    def at(self) -> Any:
        """The selection of this value alone."""
        return self.selection if self.step is None else at(self.selection, step=self.step)

    @property
    def where(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"the site {self.site.name!r}{step}, marked at {self.site.source}"

    def value_in(self, taps: Taps) -> Any:
        """Return the value of this visit."""
        value = taps.values[self.site.name]
        return value if self.step is None else value[self.step]

    def is_same(self, other: Visit) -> bool:
        return (self.site.name, self.step) == (other.site.name, other.step)


def drop_steps(sites: Any, argument: str = "sites") -> Any:
    """Drop the steps of a selection, so that it captures the values of all visits."""
    parts = tuple(flatten(check(sites, argument)))
    for part in parts:
        if isinstance(part, At) and part.index is not None:
            raise SiteError(
                f"`{argument}` contains tapax.{part}, but this function needs whole values. Leave "
                "`index` out, and index the result."
            )
    if not parts:
        raise SiteError(f"`{argument}` is {sites!r}, which picks no site.")
    return tuple(p.selection if isinstance(p, At) else p for p in parts)


def find_visits(sites: Any, taps: Taps, argument: str = "sites") -> list[Visit]:
    """List the visits that a selection picks; `taps` contains their values."""
    found = []
    distinct = {site.name: site for site in taps.sites if site.pullback == 0}
    drop_steps(sites, argument)  # raises for a selection of parts of values
    for part in flatten(check(sites, argument)):
        inner = part.selection if isinstance(part, At) else part
        picked = [s for s in distinct.values() if matches(inner, s)]
        if not picked:
            raise SiteError(f"`{argument}` contains {part!r}, which picks no site.")
        for site in picked:
            # Names do not pick values that a rule such as `tapax.ops` marks; the rule itself does.
            ruled = site.kind in ("op", "name")
            if ruled and len(picked) > 1:
                raise SiteError(
                    f"`{argument}` contains {part}, which picks {len(picked)} values. Mark the "
                    "value that you need with tapax.sow."
                )
            selection = inner if ruled else f"{site.path}@{site.call}"
            found += [Visit(site, selection, step) for step in _steps(part, site, taps)]
    return found


def _steps(part: Any, site: Site, taps: Taps) -> Sequence[int | None]:
    looped = len(site.loops) == 1 and site.loops[0].startswith("scan[")
    length = taps.values[site.name].shape[0] if looped else 0
    if not isinstance(part, At):
        return range(length) if looped else [None]
    if not looped:
        raise SiteError(
            f"tapax.{part} has a `step`, so the site must be in one scan, but the "
            f"{site.described}, is in "
            f"{'the loops ' + ', '.join(site.loops) if site.loops else 'no loop'}."
        )
    if isinstance(part.step, StepSlice):
        return range(length)[part.step.slice]
    if not isinstance(part.step, int):
        raise TypeError(
            f"`step` must be an integer or a slice here, but is {part.step!r} for {site.name!r}."
        )
    if not -length <= part.step < length:
        raise SiteError(
            f"tapax.{part} is out of range: the {site.described}, is in a loop of {length} "
            "iterations."
        )
    return [part.step % length]


def find_one_visit(sites: Any, taps: Taps, argument: str) -> Visit:
    """Return the only visit that a selection picks; raise if it picks several."""
    found = find_visits(sites, taps, argument)
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(v.at) if v.step is None else f"tapax.{v.at}" for v in found[:5])
    raise SiteError(
        f"`{argument}` must pick one value, but {sites!r} picks {len(found)}: {names}"
        f"{' and more' if len(found) > 5 else ''}."
    )


def axis_of(visit: Visit, value: PyTree, axis: int) -> int:
    if not -value.ndim <= axis < value.ndim:
        raise SiteError(
            f"`axis` is {axis}, but {visit.where}, has values of shape {list(value.shape)}, which "
            "have no such axis."
        )
    return axis % value.ndim
