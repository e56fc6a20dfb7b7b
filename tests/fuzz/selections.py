"""Selections, parts of values and functions of them, against the records of the reference.

The `picks` of a program say what to capture. Set algebra over the names in its text determines the
sites (`readings.py`). The expected array of each site comes from the records of the reference:
those of the requested iterations and layers, indexed and passed through the function in
NumPy, then arranged like the whole value.

A capture of something that does not exist, or of two arrays of one name, must raise `SiteError`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import and_, or_
from typing import Any

import jax
import numpy as np

import tapax

from .compare import (
    Expected,
    Laid,
    Mismatch,
    captured,
    compare_gradients,
    compare_result,
    compare_value,
    constant_axes,
    expected,
    missing_axes,
    wrong,
)
from .parts import FUNCTIONS, INDICES, apply, part
from .program import Both, Either, Glob, Node, Not, Of, Pick, Program, Rule
from .readings import Reading, readings
from .reductions import Placed, merged
from .reference import Record, Reference, Undecided, run
from .sites import Site


def check_selections(program: Program) -> None:
    """Capture the picks of the program with `tapax`, and compare."""
    reference = run(program)
    asked = {f"{of}s": _asked(program, of) for of in ("value", "grad")}
    wanted = {of: readings(program, of) for of in ("value", "grad")}
    refusals = [why for found in wanted.values() for why in found.wrong]
    doubts = [why for found in wanted.values() for why in found.doubtful]
    try:
        out, taps = captured(program, **asked)
    except tapax.SiteError:
        if refusals or doubts or _may_lack_gradients(reference, wanted["grad"].exact):
            return
        raise
    if refusals:
        raise Mismatch(f"a capture must raise SiteError: {refusals}")
    compare_result(reference, out)
    taps = jax.device_get(taps)
    _compare_names("values", set(taps.values), {r.key for r in wanted["value"].kept})
    extra = {key.partition("~")[0] for key in taps.grads} - {r.key for r in wanted["grad"].kept}
    _compare_names("gradients", extra, set())
    for reading in wanted["value"].kept:
        _compare_value(reference, reading, taps)
    for reading in wanted["grad"].kept:
        _compare_gradients(reference, reading, taps)


def _asked(program: Program, of: Of) -> list[Any]:
    """Make the selections for `tapax.capture`."""
    out: list[Any] = []
    for pick in program.picks:
        if pick.of != of:
            continue
        chosen: Any = [_selection(one) for one in pick.body]
        step = pick.step if pick.stop is None else slice(pick.step, pick.stop)
        parts: dict[str, Any] = {} if step is None else {"step": step}
        if pick.index is not None:
            parts["index"] = INDICES[pick.index]
        chosen = tapax.at(chosen, **parts) if parts else tuple(chosen)
        if pick.by is not None:
            chosen = {chosen: tapax.reduce.rms if pick.by == "rms" else FUNCTIONS[pick.by]}
        out.append(chosen)
    return out


def _selection(node: Node) -> Any:
    match node:
        case Glob(pattern):
            return tapax.glob(pattern)
        case Rule("kept"):
            return tapax.named("kept")
        case Rule(name):
            return tapax.ops(name)
        case Both(body):
            return reduce(and_, map(_selection, body))
        case Either(body):
            return reduce(or_, map(_selection, body))
        case Not(body):
            return ~reduce(or_, map(_selection, body))
    raise AssertionError(node)


def _may_lack_gradients(reference: Reference, exact: list[list[Reading]]) -> bool:
    """Return whether all sites of some name may lack a gradient."""

    def needs(reading: Reading) -> bool:
        want = expected(reading.site, reference.records.get(reading.site.path, []), None)
        return any(needed for _, needed in want.grads)

    return not all(any(map(needs, asked)) for asked in exact)


def _compare_names(what: str, got: set[str], want: set[str]) -> None:
    if got != want:
        raise Mismatch(f"{what}: missing {sorted(want - got)}, not expected {sorted(got - want)}")


def _fixed(site: Site, records: list[Record], axis: int, number: int) -> tuple[Site, list[Record]]:
    """Fix a site at one iteration of a loop, which removes the axis of the loop."""
    cut = lambda index: index[:axis] + index[axis + 1 :]
    kept = [replace(r, index=cut(r.index)) for r in records if r.index[axis] == number]
    return replace(site, axes=cut(site.axes), layers=()), kept


Slices = list[tuple[Site, list[Record]]]
"""A site and its records, once for each iteration that is asked for."""


def _iterations(reading: Reading, records: list[Record]) -> tuple[Slices, int | None]:
    """Return the requested iterations of a site, and the axis before which they stack."""
    site, pick, loop = reading.site, reading.pick, reading.loop
    numbers = dict(reading.numbers)
    if pick.step is None or loop is None:
        return [_pinned(site, records, numbers)], None
    axis = site.axes[loop]
    if pick.stop is None:
        step = pick.step % axis.size if axis.kind == "loop" else pick.step
        return [_pinned(site, records, {**numbers, loop: step})], None
    steps = range(pick.step, pick.stop)
    if axis.kind == "loop":
        steps = range(*slice(pick.step, pick.stop).indices(axis.size))
    if not steps:
        raise Undecided("no iterations")
    around = [i for i in site.lead if i == loop or (i not in numbers and _is_kept(site, i))]
    return [_pinned(site, records, {**numbers, loop: k}) for k in steps], around.index(loop)


def _is_kept(site: Site, axis: int) -> bool:
    return site.axes[axis].kind != "while"


def _pinned(
    site: Site, records: list[Record], numbers: dict[int, int]
) -> tuple[Site, list[Record]]:
    for axis in sorted(numbers, reverse=True):
        site, records = _fixed(site, records, axis, numbers[axis])
    return site, records


def _kept(site: Site, records: list[Record], pick: Pick) -> tuple[Site, list[Record]]:
    """Return a site and its records with the kept part of each value and gradient."""
    keep = lambda x: apply(pick.by, part(pick.index, np.asarray(x)), site.call)
    made = [
        replace(
            r,
            value=keep(r.value),
            cotangents=[replace(c, value=keep(c.value)) for c in r.cotangents],
        )
        for r in records
    ]
    return replace(site, shape=keep(np.zeros(site.shape)).shape), made


def _expected(reading: Reading, records: list[Record]) -> Expected:
    """Return the expected arrays of a site without a reducer."""
    slices, place = _iterations(reading, records)
    wants = [expected(*_kept(*one, reading.pick), None) for one in slices]
    if place is None:
        return wants[0]
    grads = [
        (_stack([laid for laid, _ in each], place), any(needed for _, needed in each))
        for each in zip(*(want.grads for want in wants), strict=True)
    ]
    value, valid = ([getattr(want, name) for want in wants] for name in ("value", "valid"))
    return Expected(_stack(value, place), _stack(valid, place), grads, wants[0].lead + 1)


def _stack(parts: list[Laid], place: int) -> Laid:
    return Laid(np.stack([p.array for p in parts], place), any(p.coarse for p in parts))


def _compare_value(reference: Reference, reading: Reading, taps: Any) -> None:
    records, key = reference.records.get(reading.site.path, []), reading.key
    valid = taps.valid[key] if reading.site.conditional else None
    if not reading.site.conditional and key in taps.valid:
        raise Mismatch(f"{key!r} always runs, but has a mask")
    if reading.pick.by != "rms":
        compare_value(key, reading.site, _expected(reading, records), taps.values[key], valid)
        return
    slices, place = _iterations(reading, records)
    placed = [_placed(*_kept(*one, reading.pick)) for one in slices]
    want, ran = _rms(slices, placed, place)
    if not missing_axes(taps.values[key], want, want.array.ndim):
        raise wrong(f"values[{key!r}]", taps.values[key], want)
    if valid is not None and not missing_axes(valid > 0, ran, ran.array.ndim):
        raise wrong(f"valid[{key!r}]", valid, ran)


def _compare_gradients(reference: Reference, reading: Reading, taps: Any) -> None:
    site, key = reading.site, reading.key
    records = reference.records.get(site.path, [])
    if reading.pick.by != "rms":
        whole = _expected(
            replace(reading, pick=replace(reading.pick, index=None, by=None)), records
        )
        missing = constant_axes(whole.value, whole.lead)
        compare_gradients(key, taps.grads, _expected(reading, records).grads, missing)
        return
    if site.grads != 1 or key not in taps.grads:
        return
    slices, place = _iterations(reading, records)
    found = [dict(merged(*_with_gradients(*one, reading.pick))) for one in slices]
    want = Laid(np.zeros(0))
    for axes in found[0]:
        if all(axes in each for each in found):
            want, _ = _rms(slices, [each[axes] for each in found], place)
            if missing_axes(taps.grads[key], want, want.array.ndim):
                return
    raise wrong(f"grads[{key!r}]", taps.grads[key], want)


def _with_gradients(site: Site, records: list[Record], pick: Pick) -> tuple[Site, list[Record]]:
    """Return a site and its records with the kept part of each gradient, but whole values.

    The whole values show which axes the value does not depend on.
    """
    _, kept = _kept(site, records, pick)
    both = zip(records, kept, strict=True)
    return site, [replace(whole, cotangents=part.cotangents) for whole, part in both]


def _loops(site: Site) -> list[int]:
    return [i for i in site.lead if site.axes[i].kind == "loop"]


def _placed(site: Site, records: list[Record]) -> Placed:
    loops = _loops(site)
    return [(tuple(r.index[i] for i in loops), r.value) for r in records]


def _rms(slices: Slices, placed: list[Placed], place: int | None) -> tuple[Laid, Laid]:
    """Return the root mean square for each iteration of the loops, and its mask."""
    out, ran = [], []
    for (site, records), values in zip(slices, placed, strict=True):
        sizes = tuple(site.axes[i].size for i in _loops(site))
        rms, some = np.zeros(sizes), np.zeros(sizes, bool)
        for at in np.ndindex(*sizes):
            here = [np.ravel(x) for where, x in values if where == at]
            if here:
                rms[at], some[at] = np.sqrt(np.mean(np.concatenate(here) ** 2)), True
        coarse = any(r.coarse or any(c.coarse for c in r.cotangents) for r in records)
        out.append(Laid(rms, coarse))
        ran.append(Laid(some))
    if place is None:
        return out[0], ran[0]
    # Merge devices, which come before loops.
    devices = sum(axis.kind == "shard" for axis in slices[0][0].axes)
    return _stack(out, place - devices), _stack(ran, place - devices)
