"""The numbers in a plot, from a capture or a log: by kind and statistic, and then by row.

A row is a site, or one iteration of a site in a scan: `GPT/blocks/mlp[3]`. A whole array counts as
its root mean square. The numbers of several units are folded into one: the rms or the norm of all
units, and the mean for other statistics.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from tapax._jax import Value
from tapax._results import Taps
from tapax._results.iterations import is_whole, rms, split_iterations, split_statistic
from tapax._sites import Selection, Site, SiteError, check, flatten, matches, nearest, split_row
from tapax.monitoring._log import Log
from tapax.monitoring._readings import split_statistics
from tapax.monitoring._records import Histogram, split_name
from tapax.monitoring._units import base_statistic, merge_units
from tapax.reduce import Reducer

Statistic: TypeAlias = "tuple[str, str]"
"""The kind, such as `value` or `grad`, and the name: `rms`. Numbers without a kind have `""`."""
Number: TypeAlias = "float | Histogram"


def numbers_of_taps(taps: Taps, at: Selection) -> dict[Statistic, dict[str, Number]]:
    """Read the numbers of the selected sites of a capture, in the order of the program."""
    if not taps.values and not taps.grads:
        raise ValueError(
            "There is nothing to plot: the capture returned no values and no gradients. "
            "tapax.sites(fn)(*args) lists the sites of a function."
        )
    at = check(at, "at")
    sites = {site.name: site for site in taps.sites}
    rows: dict[str, dict[str, dict[Statistic, Number]]] = {}
    selected, types = False, {}
    for name in dict.fromkeys([*sites, *taps.values, *taps.grads]):
        for kind, arrays in (("value", taps.values), ("grad", taps.grads)):
            if name not in arrays:
                continue
            site = sites.get(name, Site(name))
            reducer = site.reducer if kind == "value" else site.grad_reducer
            marked, first = split_statistic(site, reducer)
            described = taps.values.get(name, arrays[name])
            lead = max(0, described.ndim - len(site.shape)) if name in sites else 0
            types[str(arrays[name].dtype)] = None
            selected |= _is_selected(at, marked, marked.name)
            # The table of sites may list the statistics of one site in different places.
            of_site = rows.setdefault(marked.name, {})
            read = _read(marked, reducer, first, arrays[name], taps.valid.get(name), lead)
            for row, stat, number in read:
                if _is_selected(at, marked, row):
                    of_site.setdefault(row, {})[kind, stat] = number
    found: dict[Statistic, dict[str, Number]] = {}
    for row, numbers in (entry for of_site in rows.values() for entry in of_site.items()):
        for stat, number in numbers.items():
            found.setdefault(stat, {})[row] = number
    if not found and not selected:
        raise _no_match(at, rows, "the capture")
    if not found:
        raise ValueError(
            "There is nothing to plot: the selected sites did not run, or are not arrays of "
            f"numbers. Their dtypes are {', '.join(types)}."
        )
    return found


def rows_of_taps(taps: Taps) -> dict[str, None]:
    """List all rows that a capture may have, in the order of the program."""
    rows: dict[str, None] = {}
    for site in taps.sites:
        reducer = site.reducer if site.name in taps.values else site.grad_reducer
        name = split_statistic(site, reducer)[0].name
        sizes = [re.fullmatch(r"scan\[(\d+)\]", loop) for loop in site.loops]
        lengths = [int(size[1]) for size in itertools.takewhile(bool, sizes) if size]
        for place in itertools.product(*map(range, lengths)):
            rows[f"{name}[{','.join(map(str, place))}]" if place else name] = None
    return rows


def numbers_of_log(log: Log, at: Selection) -> dict[Statistic, dict[str, dict[int, Number]]]:
    """Read the numbers of the selected sites of a log, by step."""
    if not len(log):
        raise ValueError(
            "There is nothing to plot: the log is empty. A monitor fills a log: "
            "tapax.monitor(step, every=100, to=log)."
        )
    at = check(at, "at")
    split = {name: split_name(name) for name in log.names}
    names = {name: ((kind, stat or name), row) for name, (row, kind, stat) in split.items()}
    rows = {row: _is_selected(at, _site(row), row) for _, row in names.values()}
    if not any(rows.values()):
        raise _no_match(at, rows, "the log")
    found: dict[Statistic, dict[str, dict[int, Number]]] = {}
    for stat, row in names.values():
        if rows[row]:
            found.setdefault(stat, {})[row] = {}
    for step, record in log:
        for name, number in record.items():
            stat, row = names[name]
            if rows[row] and (folded := merge_units(stat[1], number)) is not None:
                found[stat][row][step] = folded
    kept = {
        stat: {row: by_step for row, by_step in series.items() if by_step}
        for stat, series in found.items()
    }
    if not any(kept.values()):
        raise ValueError("There is nothing to plot: the log contains no numbers.")
    return {stat: series for stat, series in kept.items() if series}


def _no_match(at: Selection, rows: Iterable[str], where: str) -> SiteError:
    near = nearest(at, rows) if isinstance(at, str) else nearest("", rows)
    return SiteError(f"`at` is {at!r}, which matches nothing in {where}. {near}")


def pick_statistics(
    found: Mapping[Statistic, Any], stats: str | Iterable[str] | None
) -> list[Statistic]:
    """Choose the statistics to draw: scales first, values before gradients."""
    there = list(dict.fromkeys(stat for _, stat in found))
    if stats is None:
        wanted = sorted(there, key=lambda stat: _ORDER.get(base_statistic(stat), 2))
    else:
        wanted = [stats] if isinstance(stats, str) else list(stats)
        if not wanted:
            raise ValueError("`stats` is empty. Leave it out to draw all statistics.")
        for stat in wanted:
            if stat not in there:
                raise ValueError(
                    f"`stats` contains {stat!r}, which was not captured. The statistics are "
                    f"{', '.join(map(repr, there))}."
                )
    return [(kind, stat) for stat in wanted for kind in _KINDS if (kind, stat) in found]


_KINDS = ("value", "grad", "param", "param_grad", "update", "")
_ORDER = {"rms": 0, "norm": 1, "histogram": 3}


def has_histograms(numbers: Mapping[str, Number]) -> bool:
    """Return whether some of the numbers by row are histograms."""
    return any(isinstance(number, Histogram) for number in numbers.values())


def is_on_log_axis(stat: str, numbers: np.ndarray) -> bool:
    """Return whether numbers differ by orders of magnitude."""
    if base_statistic(stat) in ("rms", "norm", "var", "update_ratio"):
        return True
    finite = numbers[np.isfinite(numbers)]
    return bool(finite.size and finite.min() > 0 and finite.max() / finite.min() > 100)


def _read(
    site: Site, reducer: Reducer | None, stat: str, array: Value, valid: Value, lead: int
) -> Iterator[tuple[str, str, Number]]:
    """Yield each number of a site: its row, its statistic, and the number."""
    if not jax.numpy.issubdtype(array.dtype, np.number):
        return
    for iteration in split_iterations(site, array, valid, lead, "A plot"):
        ran = iteration.computed
        if not iteration.mask.any() or not ran.size:
            continue
        if is_whole(reducer):
            yield iteration.name, stat, rms(ran)
            continue
        assert reducer is not None
        for name, number in split_statistics(reducer, stat, ran):
            if (folded := merge_units(name, number)) is not None:
                yield iteration.name, name, folded


def _site(row: str) -> Site:
    """Make the site of a row of a log."""
    path, call, pullback, _ = split_row(row)
    return Site(path, call=call, pullback=pullback)


def _is_selected(at: Selection, site: Site, row: str) -> bool:
    for part in flatten(at):
        if not isinstance(part, str):
            found = matches(part, site)
        else:
            # Here a glob picks operations, too, because the user captured them.
            marked = dataclasses.replace(site, kind="sow")
            found = part == row or matches(part, marked) or matches(part, Site(row))
        if found:
            return True
    return False
