"""Handlers of the equations that have bodies: how each is re-staged so that its taps come out.

A handler takes the walk, the equation and its operands, and returns the equation's results. It
drops the operands that are tokens, has the body walked, binds the equation again with the new
body, and says what leaving that body does to the entries recorded inside.

Adding a primitive is adding a function here, under its name, and a test.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from tapax import _jax
from tapax._calls import Token
from tapax._changes import Around
from tapax._record import Entry, Slots, refuse_folded
from tapax._sites.errors import SiteError
from tapax._sites.selections import StepSlice
from tapax._totals import scan_totals, selected
from tapax._walk import Walk, eager, handles


@handles("jit", "pjit")
def _jit(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    params = dict(eqn.params)
    body = params["jaxpr"]
    if eager():
        return walk.run(body, args)
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads)
    handed = walk.handed(threads)

    def inputs(name: str, fill: Any) -> tuple[Any, ...]:
        return (*(params[name][i] for i in staged.ins.kept), *(fill for _ in handed))

    def outputs(name: str, fill: Any) -> tuple[Any, ...]:
        return (*(params[name][i] for i in staged.outs.kept), *(fill for _ in staged.types))

    params.update(
        jaxpr=staged.jaxpr,
        donated_invars=inputs("donated_invars", False),
        in_shardings=inputs("in_shardings", _jax.UNSPECIFIED),
        in_layouts=inputs("in_layouts", None),
        out_shardings=outputs("out_shardings", _jax.UNSPECIFIED),
        out_layouts=outputs("out_layouts", None),
    )
    results = eqn.primitive.bind(*staged.ins.arrays(args), *handed, **params)
    return walk.unstage(staged, results)


@handles("closed_call", "core_call", "call", "eval_jaxpr", "core_closed_call")
def _call(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    (name,) = (k for k in eqn.params if k in ("call_jaxpr", "jaxpr"))
    body = eqn.params[name]
    if eager() or not hasattr(body, "consts"):
        return walk.run(body, args)
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads)
    values = [*staged.ins.arrays(args), *walk.handed(threads)]
    bound = eqn.replace(params={**eqn.params, name: staged.jaxpr})
    return walk.unstage(staged, _jax.bind_equation(bound, values))


@handles("optimization_barrier")
def _barrier(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    slots = Slots.of(args)
    return slots.fill(iter(_jax.bind_equation(eqn, slots.arrays(args))))


@handles("remat2", "remat", "checkpoint")
def _remat(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """Bound again as the remat it is, else the backward half would keep what it should drop."""
    params = dict(eqn.params)
    body = params["jaxpr"]
    if eager():
        return walk.run(body, args)
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads, recomputing=params["differentiated"])
    handed = walk.handed(threads)
    jaxpr, consts = _jax.closed(staged.jaxpr)
    if isinstance(params["prevent_cse"], tuple):
        kept = (params["prevent_cse"][i] for i in staged.ins.kept)
        params["prevent_cse"] = (*(False for _ in consts), *kept, *(False for _ in handed))
    params["jaxpr"] = jaxpr
    results = eqn.primitive.bind(*consts, *staged.ins.arrays(args), *handed, **params)
    return walk.unstage(staged, results)


@handles("scan")
def _scan(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
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

    with walk.replayed() as rewind:

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
            (carried, folds), (stacked, _) = jax.lax.scan(
                once if eager() else step, start, over, **options
            )
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
                f"step={index} was asked for of the site {entry.site.name!r}, marked at "
                f"{entry.site.source}, but its loop has {length} iterations."
            )
        lead -= isinstance(index, int)
        entry = entry.with_arrays(a[index] for a in entry.arrays)
    met = entry._replace(lead=lead, step=None, loops=(loop, *entry.loops))
    return selected(met) if met.is_total and not isinstance(step, int) else met


@handles("cond")
def _cond(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    index, *values = args
    branches = eqn.params["branches"]
    threads = walk.enter(*branches)
    # Calls are numbered as they were written.
    order = (1, 0) if walk.of_two else range(len(branches))
    made = {i: walk.stage(branches[i], values, threads, branch=i) for i in order}
    parts = [made[i] for i in range(len(branches))]
    operands = [*parts[0].ins.arrays(values), *walk.handed(threads)]
    nfolds = len(walk.folds.arrays(threads.folds))
    # Residuals of one place may be a token in one branch and an empty filling in another.
    merged = Slots(tuple(map(_merged, *(part.outs.tokens for part in parts))))
    held = [part.types[: len(part.types) - nfolds] for part in parts]

    def padded(chosen: int) -> Any:
        part = parts[chosen]

        def branch(*flat: Any) -> list[Any]:
            results = iter(jaxpr_as_fun(part.jaxpr)(*flat))
            own = part.outs.fill(results)
            rest = list(results)
            inner = rest[: len(rest) - nfolds]
            filled = [
                x
                for i, types in enumerate(held)
                for x in (inner if i == chosen else [_jax.zeros(t) for t in types])
            ]
            return [*merged.arrays(own), *filled, *rest[len(rest) - nfolds :]]

        return branch

    functions = [padded(i) for i in range(len(parts))]
    if eager() and not isinstance(index, Tracer):
        results = functions[int(index)](*operands)
    else:
        jaxprs = tuple(jax.make_jaxpr(f)(*operands) for f in functions)
        results = eqn.primitive.bind(index, *operands, **dict(eqn.params, branches=jaxprs))
    flat = iter(results)
    own = merged.fill(flat)
    entries = [[e.with_arrays(flat) for e in part.entries] for part in parts]
    for i in order:
        ran = jnp.asarray(index) == i
        for entry in entries[i]:
            refuse_folded(entry)
            valid = ran if entry.valid is None else entry.valid
            walk.entries.append(entry._replace(valid=valid))
    certain = [all(seen) for seen in zip(*(part.certain for part in parts), strict=True)]
    walk.folds.restore(threads.folds, list(flat), certain)
    return own


def _merged(*tokens: Token | None) -> Token | None:
    """What a result of several branches stands for, if it is a token in any of them."""
    some = [t for t in tokens if t is not None]
    if not some:
        return None
    return Token(frozenset().union(*(t.calls for t in some)), any(t.array for t in some))
