"""The handler of `lax.scan`: it stacks what its body records."""

from typing import Any

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._sites import SiteError, StepSlice
from tapax._walk.carried_states import scan_totals, selected
from tapax._walk.changes import Around
from tapax._walk.entries import Entry, Slots, refuse_folded
from tapax._walk.interpreter import Interpreter, eager


def walk_scan(walk: Interpreter, eqn: Any, args: list[Any]) -> list[Any]:
    params = eqn.params
    body, length = params["jaxpr"], params["length"]
    nconsts, ncarry = _jax.scan_split(params)
    consts, init, xs = args[:nconsts], args[nconsts : nconsts + ncarry], args[nconsts + ncarry :]
    init = walk.materialize(eqn.invars[nconsts : nconsts + ncarry], init)
    carried_out = _jax.open_jaxpr(body).outvars[:ncarry]
    threads = walk.enter(body)
    slots = Slots.of(xs)
    around = Around("scan", length)
    # What a change needs for each iteration goes in with what is scanned over.
    depth = len(walk.around)
    each = walk.changes.at_depth(threads.parts, depth, length)
    numbers = jnp.arange(length, dtype=jnp.int32) if walk.changes.counts(body) else None
    cell: dict[str, Any] = {}

    def step(carry: Any, x: Any) -> Any:
        (state, folds), (x, parts, number) = carry, x
        with walk.inside(around=[around]):
            walk.folds.restore(threads.folds, folds)
            walk.changes.hand_down(each, parts, below=depth + 1)
            if number is not None:
                walk.changes.count(number)
            outs = walk.run(body, [*consts, *state, *slots.fill(iter(x))])
            carried = walk.materialize(carried_out, outs[:ncarry])
            ys = Slots.of(outs[ncarry:])
            totals = [e for e in walk.entries if e.is_total]
            entries = [e for e in walk.entries if not e.is_total]
            arrays = [*ys.arrays(outs[ncarry:]), *(a for e in entries for a in e.arrays)]
            # A value that the backward pass keeps anyway is stacked once.
            stacked = {id(y): y for y in arrays}
            order = {key: i for i, key in enumerate(stacked)}
            cell.update(
                ys=ys,
                entries=tuple(e.bare for e in entries),
                totals=tuple(e.bare for e in totals),
                places=[order[id(y)] for y in arrays],
                certain=walk.folds.certain(threads.folds) if length else (),
            )
            carry = carried, walk.folds.arrays(threads.folds)
            return carry, (list(stacked.values()), [a for e in totals for a in e.arrays])

    rewind = walk.rewinder()

    def once(carry: Any, x: Any) -> Any:
        rewind()
        return step(carry, x)

    start = (list(init), walk.folds.arrays(threads.folds))
    over = (slots.arrays(xs), walk.changes.arrays(each), numbers)
    options = {"length": length, "reverse": params["reverse"], "unroll": params["unroll"]}
    if params.get("_split_transpose"):
        options["_split_transpose"] = True
    if walk.plan.over_loops:
        (carried, folds), stacked, totals = scan_totals(step, start, over, cell, **options)
        walk.entries += totals
    else:
        run = once if eager() else step
        (carried, folds), (stacked, _) = jax.lax.scan(run, start, over, **options)
    walk.folds.restore(threads.folds, folds, cell["certain"])
    flat = (stacked[i] for i in cell["places"])
    ys = cell["ys"].fill(flat)
    for entry in cell["entries"]:
        walk.entries.append(_stacked(entry.with_arrays(flat), f"scan[{length}]"))
    return [*carried, *ys]


def _stacked(entry: Entry, loop: str) -> Entry:
    """An entry that a loop has stacked; the iterations asked for of it, where some were."""
    refuse_folded(entry)
    lead, step = entry.lead + 1, entry.step
    if step is not None:
        index = step.slice if isinstance(step, StepSlice) else step
        length = entry.state[0].shape[0]
        if isinstance(index, int) and not -length <= index < length:
            raise SiteError(
                f"step={index} was asked for of the {entry.site.described}, but its loop has "
                f"{length} iterations."
            )
        lead -= isinstance(index, int)
        entry = entry.with_arrays(a[index] for a in entry.arrays)
    met = entry._replace(lead=lead, step=None, loops=(loop, *entry.loops))
    return selected(met) if met.is_total and not isinstance(step, int) else met
