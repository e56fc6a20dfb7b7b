"""The search for a NaN planted at one execution of one mark.

The search must find the NaN at its origin: the line, the iterations, the example, the device and
the element. If the NaN reaches no result, or is not planted, it must find nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tapax

from .build import by_hand
from .compare import Mismatch, arguments
from .edits import decide
from .program import Jit, Program, is_explicit, nodes
from .reference import Record, Undecided, run
from .sites import Path, Site


def break_element(value: Any, at: Any) -> Any:
    """Replace the elements where `at` is true by the logarithm of a negative number."""
    u = 1 + value * value
    return jnp.where(at, jnp.log(jnp.where(at, -u, u)), value)


_LINES, _START = inspect.getsourcelines(break_element)
LINE = _START + next(i for i, line in enumerate(_LINES) if "jnp.log" in line)


def check_nonfinite(program: Program) -> None:
    """Plant a NaN at one execution of one mark, search for it, and compare."""
    decide(program)
    site, record = _place(program)

    def mark(value: Any, path: Path, planted: Any, at: tuple[Any, ...]) -> Any:
        if path != site.path:
            return value
        hit = planted
        for now, then in zip(at, record.index, strict=True):
            hit &= now == then
        first = jnp.arange(value.size).reshape(value.shape) == 0
        return break_element(value, hit & first)

    fn, args = by_hand(program, mark), arguments(program)
    if program.how != "plain":
        fn = jax.jit(fn)
    try:
        jax.jit(fn)(jnp.asarray(False), *args)
    except Exception as error:
        raise Undecided("JAX refuses the program with a plant in it") from error
    find = tapax.find_nonfinite(fn)
    nothing = find(jnp.asarray(False), *args)
    if nothing is not None:
        raise Mismatch(f"nothing is planted, but this is found:\n{nothing}")
    planted = jnp.asarray(True)
    is_bad = not np.isfinite(np.asarray(jax.jit(fn)(planted, *args), np.float64)).all()
    found = find(planted, *args)
    if (found is not None) != is_bad:
        reaches = "reaches" if is_bad else "does not reach"
        raise Mismatch(f"the NaN at {site.label!r} {reaches} a result, but this is found:\n{found}")
    if found is not None:
        _compare(program, site, record, found)


def _place(program: Program) -> tuple[Site, Record]:
    """Draw one execution of one mark of floating-point numbers."""
    reference = run(program)
    places = [
        (site, record)
        for site in reference.sites
        if site.dtype != "int"
        for record in reference.records.get(site.path, ())
    ]
    if not places:
        raise Undecided("nothing to plant a NaN at")
    return places[np.random.default_rng(program.seed).integers(len(places))]


def _compare(program: Program, site: Site, record: Record, found: tapax.Finding) -> None:
    def numbers(*kinds: str) -> tuple[int, ...]:
        pairs = zip(site.axes, record.index, strict=True)
        return tuple(i for axis, i in pairs if axis.kind in kinds)

    want: dict[str, Any] = {
        "operation": "log",
        "kind": "nan",
        "iterations": numbers("loop", "while"),
        "mapped": numbers("map"),
        "index": (0,) * len(site.shape),
        "count": 1,
    }
    # JAX gives the line of the call for a custom function that was traced before its derivative is
    # taken; JAX 0.10 also does so for an inlined function.
    inlined = any(isinstance(node, Jit) and node.inline for node in nodes(program.body))
    has_source = not {"bwd", "own", "body"} & set(site.path) and not inlined
    if is_explicit(program.body) and not found.mapped:
        del want["mapped"], want["index"]
    elif not has_source and not found.mapped:
        # Nothing in the traced rule of a custom function may tell which axes `vmap` maps over.
        want["index"] = want.pop("mapped") + want["index"]
    if has_source:
        want["source"] = f"{__file__}:{LINE}"
    got = {name: getattr(found, name) for name in want}
    want["device"] = numbers("shard")
    got["device"] = tuple(found.device.values())[: len(want["device"])]
    if got != want:
        raise Mismatch(f"a NaN at {site.label!r}: expected {want},\ngot {got}\n{found}")
