"""Reducers over loops: the states that a loop carries.

A scan stacks what its body records. What a reducer over loops, `rms.total`, makes of it is carried
instead: as many numbers as one iteration has. What is carried must be known before the loop runs,
so its body is traced first, and the loop is made of what was traced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._jax import PyTree, Static, Value, pytrees, typed
from tapax._jaxpr.leading_axes import where
from tapax._jaxpr.restage import Scan
from tapax._walk.entries import Entry, refuse_folded


def scan_totals(
    loop: Scan, step: Callable[..., Any], start: PyTree, over: PyTree
) -> tuple[Any, list[Value], list[Entry], Static[Any]]:
    """Runs `step(carry, x) -> (carry, (stacked, totals, recorded))` as a scan that carries totals.

    Returns what it carries and stacks in the end, the totals as entries, and what was recorded.
    """
    treedef = pytrees.structure((start, over))
    slices = [_jax.unstacked(jax.typeof(x)) for x in jax.tree.leaves(over)]
    now = [jax.typeof(x) for x in jax.tree.leaves(start)]

    def body(*flat: Value) -> Any:
        return step(*treedef.unflatten(flat))

    jaxpr, shape = typed.make_jaxpr(body, return_shape=True)(*now, *slices)
    results = pytrees.structure(shape)
    recorded = shape[1][2]
    entries: Sequence[Entry] = recorded.value.totals
    avals = [v.aval for v in _jax.open_jaxpr(jaxpr).outvars]
    types = iter(avals[len(avals) - sum(len(e.arrays) for e in entries) :])
    totals = [(e, [next(types) for _ in e.arrays]) for e in entries]

    def again(carry: PyTree, x: Value) -> Any:
        carry, held = carry
        outs = _jax.as_function(jaxpr)(*jax.tree.leaves(carry), *jax.tree.leaves(x))
        carry, (stacked, new, _) = results.unflatten(outs)
        arrays, before = iter(new), iter(held)
        held = [
            y
            for entry in entries
            for y in joined(
                entry,
                [next(before) for _ in range(len(entry.state) + 1)],
                entry.with_arrays(arrays),
                backwards=loop.reverse,
            )
        ]
        return (carry, held), stacked

    held = [x for entry, types in totals for x in nothing_yet(entry, types)]
    (carry, held), stacked = loop.run(again, (start, held), over)
    arrays = iter(held)
    return carry, stacked, [_left(entry, arrays, loop.length) for entry in entries], recorded


def nothing_yet(entry: Entry, types: Sequence[Any]) -> list[Any]:
    """What a loop carries for an entry at first: an empty state, and how often it ran."""
    refuse_folded(entry)
    assert entry.reduction is not None
    count = len(entry.state)
    ran = _jax.zeros(types[count]) if entry.valid is not None else typed.zeros((), bool)
    start = [*entry.reduction.empty(types[:count]), ran.astype(jnp.int32)]
    axes = frozenset[str]().union(*map(_jax.varying_axes, types))
    return [_jax.with_varying(x, axes) for x in start]


def joined(entry: Entry, held: Sequence[Any], new: Entry, *, backwards: bool = False) -> list[Any]:
    """The same after an iteration. One that runs backwards comes before those that ran."""
    assert entry.reduction is not None
    *state, ran = held
    new = new.even
    pair = (new.state, state) if backwards else (state, new.state)
    both = entry.reduction.combine(*pair, entry.lead)
    # What has seen nothing is no more than a filling, whatever `combine` makes of it.
    both = [where(ran > 0, x, y) for x, y in zip(both, new.state, strict=True)]
    if new.valid is None:
        return [*both, ran + 1]
    kept = [where(new.valid, x, y) for x, y in zip(both, state, strict=True)]
    return [*kept, ran + new.valid.astype(jnp.int32)]


def selected(entry: Entry) -> Entry:
    """An entry over loops some of whose iterations were asked for: those along its first axis."""
    assert entry.reduction is not None
    state = entry.reduction.masked(entry.state, entry.valid)
    ran = None if entry.valid is None else entry.valid.astype(jnp.int32).sum(0)
    lead = entry.lead - 1
    merged = tuple(entry.reduction.merge(state, lead))
    return entry._replace(value=merged, valid=ran, lead=lead, loops=entry.loops[1:])


def _left(entry: Entry, arrays: Any, length: int) -> Entry:
    """The entry of a scan that is over."""
    state = tuple(next(arrays) for _ in entry.state)
    ran = next(arrays)
    valid = ran if entry.valid is not None or not length else None
    return entry._replace(value=state, valid=valid, steps=entry.steps[1:])
