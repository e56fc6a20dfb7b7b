"""Cuts: the prefix and the suffix of a function at a site compose to the function.

A site can be cut unless it is in a branch, a while loop, or more than one loop; a site in a scan
is cut at one iteration. Any other site raises `SiteError`, and so does the suffix at a site that
never reaches the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import tapax

from .compare import Laid, Mismatch, arguments, expected, missing_axes, wrong
from .edits import decide, is_idle, marked, same
from .program import Edit, Program
from .reference import Reference, run
from .sites import Site

CUTS = 3
"""At how many sites a program is cut: compiling is what costs."""


def check_cuts(program: Program) -> None:
    """Cut the program at some of its sites, and compare."""
    decide(program)
    reference = run(program)
    fn, args = marked(program), arguments(program)
    plainly = reference.out
    rng = np.random.default_rng(program.seed)
    found = reference.sites
    for i in rng.permutation(len(found))[:CUTS]:
        site = found[i]
        name: Any = f"{site.name}@{site.call}"
        loops = [a for a in site.axes if a.kind in ("loop", "while")]
        step = None
        if loops:
            _refuses(fn, args, name)
            step = int(rng.integers(0, max(1, loops[-1].size)))
            name = tapax.at(name, step=step)
        if site.conditional or site.counted or len(loops) > 1:
            _refuses(fn, args, name)
            continue
        value = tapax.prefix(fn, name)(*args)
        _compare_value(reference, site, step, value)
        try:
            out = tapax.suffix(fn, name)(value, *args)
        except tapax.SiteError as error:
            edit = Edit(f"{site.name}@{site.call}", "number")
            idle = is_idle(replace(program, edits=(edit,)), {}, plainly)
            if "never reaches" not in str(error) or not idle:
                raise
        else:
            same(program, f"the function cut at {name!r}", out, plainly)


def _refuses(fn: Callable[..., Any], args: Any, name: Any) -> None:
    try:
        tapax.prefix(fn, name)(*args)
    except tapax.SiteError:
        return
    raise Mismatch(f"a cut at {name!r} must raise")


def _compare_value(reference: Reference, site: Site, step: int | None, got: Any) -> None:
    want = expected(site, reference.records.get(site.path, []), None)
    laid, lead = want.value, want.lead
    if step is not None:
        assert site.loop is not None
        laid = Laid(laid.array.take(step, site.lead.index(site.loop)), laid.coarse)
        lead -= 1
    if not missing_axes(got, laid, lead):
        raise wrong(f"the value of {site.label!r}", got, laid)
