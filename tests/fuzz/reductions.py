"""Statistics of values and gradients, against every execution that the reference records.

A reducer has one result for each iteration of the loops around a site. It merges examples, devices
and iterations of while loops, and with `.total` the iterations of all loops. A site that did not
run is zero, with a false mask. An axis that a value does not depend on may be missing: a mean, a
variance, a minimum and a maximum are the same without it, and gradients add along it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tapax

from .compare import Laid, Mismatch, captured, close, compare_result, missing_axes, wrong
from .program import Program
from .reference import Record, run
from .sites import Site

STATISTICS: dict[str, Callable[[np.ndarray], Any]] = {
    "moments": lambda x: (x.mean(), x.var()),
    "minmax": lambda x: (x.min(), x.max()),
}

Placed = list[tuple[tuple[int, ...], np.ndarray]]
"""Arrays, and the iteration of every loop that each stands for."""


def check_reductions(program: Program) -> None:
    """Capture statistics of the program with `tapax`, and compare."""
    reference = run(program)
    floats = _reducers(STATISTICS)
    dtypes = {site.dtype for site in reference.sites}
    values = {_is_integer: _reducers(["minmax"])} if "int" in dtypes else {}
    grads = {_is_float: floats} if dtypes - {"int"} else {}
    asked: dict[str, Any] = {"values": values | grads, "grads": grads}
    try:
        out, taps = captured(program, **asked)
    except tapax.SiteError as error:
        # The parts of a second gradient through a checkpoint do not exist at the same time.
        if "sum of several parts" in str(error) and any(s.grads > 1 for s in reference.sites):
            return
        raise
    compare_result(reference, out)
    taps = jax.device_get(taps)
    for site in reference.sites:
        records = reference.records.get(site.path, [])
        for name in _names(site):
            _compare_values(site, records, name, taps)
            if site.grads == 1 and not site.counted and site.dtype != "int":
                _compare_gradients(site, records, name, taps)


def _is_float(site: tapax.Site) -> bool:
    return jnp.issubdtype(site.dtype, jnp.floating)


def _is_integer(site: tapax.Site) -> bool:
    return jnp.issubdtype(site.dtype, jnp.integer)


def _reducers(names: Iterable[str]) -> list[Any]:
    each = [getattr(tapax.reduce, name) for name in names]
    return [*each, *(reducer.total for reducer in each)]


def _names(site: Site) -> list[str]:
    """Return the statistics of a site; integers have no mean."""
    return ["minmax"] if site.dtype == "int" else list(STATISTICS)


def _label(site: Site, name: str) -> str:
    return f"{site.name}:{name}" + (f"@{site.call}" if site.call else "")


def _loops(site: Site) -> list[int]:
    return [i for i in site.lead if site.axes[i].kind == "loop"]


def _reduced(site: Site, name: str, placed: Placed, coarse: bool) -> tuple[Laid, Laid, Laid]:
    """Return the statistic for each iteration of the loops that ran, and the total."""
    sizes = tuple(site.axes[i].size for i in _loops(site))
    statistic = STATISTICS[name]
    out, ran = np.zeros((*sizes, 2)), np.zeros(sizes, bool)
    for at in np.ndindex(*sizes):
        some = [x.ravel() for place, x in placed if place == at]
        if some:
            out[at], ran[at] = statistic(np.concatenate(some)), True
    total = np.zeros(2)
    if placed:
        total[:] = statistic(np.concatenate([x.ravel() for _, x in placed]))
    return Laid(out, coarse), Laid(ran), Laid(total, coarse)


def _compare_values(site: Site, records: list[Record], name: str, taps: Any) -> None:
    loops, coarse = _loops(site), any(record.coarse for record in records)
    placed = [(tuple(r.index[i] for i in loops), np.asarray(r.value, float)) for r in records]
    each, ran, total = _reduced(site, name, placed, coarse)
    label, label_of_total = _label(site, name), _label(site, f"{name}.total")
    got = taps.values[label]
    if not missing_axes(got, each, len(loops)):
        raise wrong(f"values[{label!r}]", got, each)
    if not close(taps.values[label_of_total], total):
        raise wrong(f"values[{label_of_total!r}]", taps.values[label_of_total], total)
    if site.conditional:
        valid, whole = taps.valid[label] > 0, taps.valid[label_of_total] > 0
        if not missing_axes(valid, ran, len(loops)) or bool(whole) != bool(records):
            raise wrong(f"valid[{label!r}]", valid, ran)
    elif label in taps.valid:
        raise Mismatch(f"{label!r} always runs, but has a mask")


def _compare_gradients(site: Site, records: list[Record], name: str, taps: Any) -> None:
    label, label_of_total = _label(site, name), _label(site, f"{name}.total")
    if label not in taps.grads:
        if any(r.cotangents[0].active and np.any(r.cotangents[0].value) for r in records):
            raise Mismatch(f"the gradient of {label!r} is missing")
        return
    coarse = any(r.coarse or r.cotangents[0].coarse for r in records)
    each = Laid(np.zeros(0))
    for _, placed in merged(site, records):
        each, _, total = _reduced(site, name, placed, coarse)
        if missing_axes(taps.grads[label], each, len(_loops(site))) and close(
            taps.grads[label_of_total], total
        ):
            return
    raise wrong(f"grads[{label!r}]", taps.grads[label], each)


def merged(site: Site, records: list[Record]) -> Iterator[tuple[tuple[int, ...], Placed]]:
    """Add the gradients of a site along each set of axes that its value may not depend on."""
    loops = _loops(site)
    for count in range(len(site.axes) + 1):
        for axes in combinations(range(len(site.axes)), count):
            parts: dict[tuple[int, ...], list[Record]] = {}
            for record in records:
                rest = tuple(0 if i in axes else k for i, k in enumerate(record.index))
                parts.setdefault(rest, []).append(record)
            if all(np.allclose(p[0].value, r.value) for p in parts.values() for r in p):
                yield (
                    axes,
                    [
                        (place, sum(r.cotangents[0].value for r in part))
                        for part in parts.values()
                        for place in {tuple(r.index[i] for i in loops) for r in part}
                    ],
                )
