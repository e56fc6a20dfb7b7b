"""Reducers over loops, such as `rms.total`: their states are carries of the loop.

A scan stacks the entries of its body, but carries the state of a reducer over loops, which is as
large as that of one iteration. The types of the carries must be known before the loop runs, so
`scan_totals` traces the body first and builds the loop from that trace.
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
    """Run `step(carry, x) -> (carry, (stacked, totals, recorded))` as a scan that carries totals.

    Return the final carry, the stacked results, the totals as entries, and `recorded`.
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

    def next_iteration(carry: PyTree, x: Value) -> Any:
        carry, states = carry
        outs = _jax.as_function(jaxpr)(*jax.tree.leaves(carry), *jax.tree.leaves(x))
        carry, (stacked, new, _) = results.unflatten(outs)
        arrays, before = iter(new), iter(states)
        states = [
            y
            for entry in entries
            for y in combine_iteration(
                entry,
                [next(before) for _ in range(len(entry.state) + 1)],
                entry.with_arrays(arrays),
                backwards=loop.reverse,
            )
        ]
        return (carry, states), stacked

    states = [x for entry, types in totals for x in initial_states(entry, types)]
    (carry, states), stacked = loop.run(next_iteration, (start, states), over)
    arrays = iter(states)
    return carry, stacked, [_finish(entry, arrays, loop.length) for entry in entries], recorded


def initial_states(entry: Entry, types: Sequence[Any]) -> list[Any]:
    """Make the initial carry for an entry: an empty state, and a count of zero."""
    refuse_folded(entry)
    assert entry.reduction is not None
    count = len(entry.state)
    ran = _jax.zeros(types[count]) if entry.valid is not None else typed.zeros((), bool)
    start = [*entry.reduction.empty(types[:count]), ran.astype(jnp.int32)]
    axes = frozenset[str]().union(*map(_jax.varying_axes, types))
    return [_jax.with_varying(x, axes) for x in start]


def combine_iteration(
    entry: Entry, carried: Sequence[Any], new: Entry, *, backwards: bool = False
) -> list[Any]:
    """Combine the carry for an entry with the entry of an iteration.

    In a loop that runs backwards, the state of the iteration comes before the carried state.
    """
    assert entry.reduction is not None
    *state, ran = carried
    new = new.even
    pair = (new.state, state) if backwards else (state, new.state)
    both = entry.reduction.combine(*pair, entry.lead)
    # An empty state is only a placeholder, whose combination with another is discarded.
    both = [where(ran > 0, x, y) for x, y in zip(both, new.state, strict=True)]
    if new.valid is None:
        return [*both, ran + 1]
    kept = [where(new.valid, x, y) for x, y in zip(both, state, strict=True)]
    return [*kept, ran + new.valid.astype(jnp.int32)]


def selected(entry: Entry) -> Entry:
    """Merge the selected iterations of an entry over loops, which are along its first axis."""
    assert entry.reduction is not None
    state = entry.reduction.masked(entry.state, entry.valid)
    ran = None if entry.valid is None else entry.valid.astype(jnp.int32).sum(0)
    lead = entry.lead - 1
    merged = tuple(entry.reduction.merge(state, lead))
    return entry._replace(value=merged, valid=ran, lead=lead, loops=entry.loops[1:])


def _finish(entry: Entry, arrays: Any, length: int) -> Entry:
    """Make the entry from the final carry of a scan."""
    state = tuple(next(arrays) for _ in entry.state)
    ran = next(arrays)
    valid = ran if entry.valid is not None or not length else None
    return entry._replace(value=state, valid=valid, steps=entry.steps[1:])
