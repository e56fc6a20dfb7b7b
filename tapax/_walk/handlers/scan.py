"""The handler of `lax.scan`, which stacks the entries of its body."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from tapax import _jax
from tapax._jax import Equation, PyTree, Static, Value, typed
from tapax._jaxpr.kinds import Kind
from tapax._jaxpr.restage import Scan, is_eager
from tapax._sites import SiteError, StepSlice
from tapax._walk.carried_states import scan_totals, selected
from tapax._walk.changes import Around
from tapax._walk.entries import Entry, Slots, refuse_folded
from tapax._walk.interpreter import Interpreter
from tapax._walk.packed_states import Packing, pack


class _Recorded(NamedTuple):
    """The static description of the stacked results; `positions` has the position of each array."""

    ys: Slots
    entries: tuple[Entry, ...]
    totals: tuple[Entry, ...]
    positions: list[int]
    packing: Packing
    certain: tuple[bool, ...]


def walk_scan(walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
    loop = Scan.of(eqn, args)
    ncarry = len(loop.init)
    start = len(loop.consts)
    init = walk.materialize(eqn.invars[start : start + ncarry], loop.init)
    carried_out = _jax.open_jaxpr(loop.body).outvars[:ncarry]
    threads = walk.enter(loop.body)
    slots = Slots.of(loop.xs)
    around = Around(Kind.SCAN, "scan", loop.length, scopes=walk.scopes)
    # The parts of changes with one array per iteration become inputs of the scan.
    depth = len(walk.around)
    each = walk.changes.at_depth(threads.parts, depth, loop.length)
    counted = walk.changes.counts(loop.body, depth)
    numbers = typed.arange(loop.length, dtype=jnp.int32) if counted else None

    def step(carry: PyTree, x: Value) -> Any:
        (state, folds), (x, parts, number) = carry, x
        with walk.inside(around=[around]):
            walk.folds.restore(threads.folds, folds)
            walk.changes.set_arrays(each, parts, below=depth + 1)
            if number is not None:
                walk.changes.count(number, depth)
            outs = walk.run(loop.body, [*loop.consts, *state, *slots.fill(iter(x))])
            carried = walk.materialize(carried_out, outs[:ncarry])
            ys = Slots.of(outs[ncarry:])
            totals = [e for e in walk.entries if e.is_total]
            stacks = [e for e in walk.entries if not e.is_total]
            entries = [e.with_arrays(map(_jax.on_mesh, e.arrays)) for e in stacks]
            arrays = [*ys.arrays(outs[ncarry:]), *(a for e in entries for a in e.arrays)]
            # Stack a value only once if the backward pass keeps it as well.
            stacked = {id(y): y for y in arrays}
            order = {key: i for i, key in enumerate(stacked)}
            states = {id(a) for e in entries if e.reduction is not None for a in e.arrays}
            packed, packing = pack(list(stacked.values()), states)
            recorded = _Recorded(
                ys,
                tuple(e.bare for e in entries),
                tuple(e.bare for e in totals),
                [order[id(y)] for y in arrays],
                packing,
                walk.folds.certain(threads.folds) if loop.length else (),
            )
            carry = carried, walk.folds.arrays(threads.folds)
            rest = [a for e in totals for a in e.arrays]
            return carry, (packed, rest, Static(recorded))

    rewind = walk.rewinder()

    def once(carry: PyTree, x: Value) -> Any:
        rewind()
        return step(carry, x)

    first = (list(init), walk.folds.arrays(threads.folds))
    over = (slots.arrays(loop.xs), walk.changes.arrays(each), numbers)
    if walk.plan.over_loops:
        (carried, folds), stacked, totals, found = scan_totals(loop, step, first, over)
        walk.entries += totals
    else:
        run = once if is_eager() else step
        (carried, folds), (stacked, _, found) = loop.run(run, first, over)
    recorded: _Recorded = found.value
    walk.folds.restore(threads.folds, folds, recorded.certain)
    unpacked = recorded.packing.unpack(stacked)
    flat = (unpacked[i] for i in recorded.positions)
    ys = recorded.ys.fill(flat)
    for entry in recorded.entries:
        walk.entries.append(_stacked(entry.with_arrays(flat), f"scan[{loop.length}]"))
    return [*carried, *ys]


def _stacked(entry: Entry, loop: str) -> Entry:
    """Return the entry outside of the scan that stacked it, with the requested iterations."""
    refuse_folded(entry)
    step = entry.step
    if step is None:
        return entry.left_loop(loop, 1)
    index = step.slice if isinstance(step, StepSlice) else int(step)
    length = entry.state[0].shape[0]
    if isinstance(index, int) and not -length <= index < length:
        raise SiteError(
            f"step={index} was given for the {entry.site.described}, but its loop has {length} "
            "iterations."
        )
    picked = entry.with_arrays(a[index] for a in entry.arrays)
    if isinstance(index, int):
        return picked.left_loop(loop)
    picked = picked.left_loop(loop, 1)
    return selected(picked) if picked.is_over_loops else picked
