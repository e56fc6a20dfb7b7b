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
from jax.sharding import PartitionSpec

from jaxtap import _compat
from jaxtap._bodies import strip
from jaxtap._mark import unmarked
from jaxtap._record import Entry, Slots, Token, refuse_folded
from jaxtap._sites import SiteError, StepSlice
from jaxtap._walk import Walk, eager, handles


@handles("jit", "pjit")
def _jit(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    params = dict(eqn.params)
    body = params["jaxpr"]
    if eager():
        return walk.run(body, args)
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads)
    folds = walk.folds.arrays(threads)

    def inputs(name: str, fill: Any) -> tuple[Any, ...]:
        return (*(params[name][i] for i in staged.ins.kept), *(fill for _ in folds))

    def outputs(name: str, fill: Any) -> tuple[Any, ...]:
        return (*(params[name][i] for i in staged.outs.kept), *(fill for _ in staged.types))

    params.update(
        jaxpr=staged.jaxpr,
        donated_invars=inputs("donated_invars", False),
        in_shardings=inputs("in_shardings", _compat.UNSPECIFIED),
        in_layouts=inputs("in_layouts", None),
        out_shardings=outputs("out_shardings", _compat.UNSPECIFIED),
        out_layouts=outputs("out_layouts", None),
    )
    results = eqn.primitive.bind(*staged.ins.arrays(args), *folds, **params)
    return walk.unstage(staged, results)


@handles("closed_call", "core_call", "call", "eval_jaxpr", "core_closed_call")
def _call(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    (name,) = (k for k in eqn.params if k in ("call_jaxpr", "jaxpr"))
    body = eqn.params[name]
    if eager() or not hasattr(body, "consts"):
        return walk.run(body, args)
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads)
    values = [*staged.ins.arrays(args), *walk.folds.arrays(threads)]
    bound = eqn.replace(params={**eqn.params, name: staged.jaxpr})
    return walk.unstage(staged, _compat.bind_equation(bound, values))


@handles("optimization_barrier")
def _barrier(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    slots = Slots.of(args)
    return slots.fill(iter(_compat.bind_equation(eqn, slots.arrays(args))))


@handles("remat2", "remat", "checkpoint")
def _remat(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """Bound again as the remat it is, else the backward half would keep what it should drop."""
    params = dict(eqn.params)
    body = params["jaxpr"]
    if eager():
        return walk.run(body, args)
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads, recomputing=params["differentiated"])
    folds = walk.folds.arrays(threads)
    jaxpr, consts = _compat.closed(staged.jaxpr)
    if isinstance(params["prevent_cse"], tuple):
        kept = (params["prevent_cse"][i] for i in staged.ins.kept)
        params["prevent_cse"] = (*(False for _ in consts), *kept, *(False for _ in folds))
    params["jaxpr"] = jaxpr
    results = eqn.primitive.bind(*consts, *staged.ins.arrays(args), *folds, **params)
    return walk.unstage(staged, results)


@handles("scan")
def _scan(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    params = eqn.params
    body, length = params["jaxpr"], params["length"]
    nconsts, ncarry = _compat.scan_split(params)
    consts, init, xs = args[:nconsts], args[nconsts : nconsts + ncarry], args[nconsts + ncarry :]
    init = walk.materialize(eqn.invars[nconsts : nconsts + ncarry], init)
    carried_out = _compat.open_jaxpr(body).outvars[:ncarry]
    threads = walk.enter(body)
    slots = Slots.of(xs)
    cell: dict[str, Any] = {}

    def step(carry: Any, x: Any) -> Any:
        state, folds = carry
        with walk.inside(loop=(f"scan[{length}]", length)):
            walk.folds.restore(threads, folds)
            outs = walk.run(body, [*consts, *state, *slots.fill(iter(x))])
            carried = walk.materialize(carried_out, outs[:ncarry])
            ys = Slots.of(outs[ncarry:])
            arrays = [*ys.arrays(outs[ncarry:]), *(a for e in walk.entries for a in e.arrays)]
            # A value that the backward pass keeps anyway is stacked once.
            stacked = {id(y): y for y in arrays}
            order = {key: i for i, key in enumerate(stacked)}
            cell.update(
                ys=ys,
                entries=tuple(e.bare for e in walk.entries),
                places=[order[id(y)] for y in arrays],
                certain=walk.folds.certain(threads) if length else (),
            )
            return (carried, walk.folds.arrays(threads)), list(stacked.values())

    with walk.replayed() as rewind:

        def once(carry: Any, x: Any) -> Any:
            rewind()
            return step(carry, x)

        (carried, folds), stacked = jax.lax.scan(
            once if eager() else step,
            (list(init), walk.folds.arrays(threads)),
            slots.arrays(xs),
            length=length,
            reverse=params["reverse"],
            unroll=params["unroll"],
            **({"_split_transpose": True} if params.get("_split_transpose") else {}),
        )
    walk.folds.restore(threads, folds, cell["certain"])
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
        length = entry.value.shape[0]
        if isinstance(index, int) and not -length <= index < length:
            raise SiteError(
                f"step={index} was asked for of the site {entry.site.name!r}, marked at "
                f"{entry.site.source}, but its loop has {length} iterations."
            )
        lead -= isinstance(index, int)
        entry = entry.with_arrays(a[index] for a in entry.arrays)
    return entry._replace(lead=lead, step=None, loops=(loop, *entry.loops))


@handles("cond")
def _cond(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    index, *values = args
    branches = eqn.params["branches"]
    threads = walk.enter(*branches)
    # Calls are numbered as they were written.
    order = (1, 0) if walk.of_two else range(len(branches))
    made = {i: walk.stage(branches[i], values, threads, branch=i) for i in order}
    parts = [made[i] for i in range(len(branches))]
    operands = [*parts[0].ins.arrays(values), *walk.folds.arrays(threads)]
    nfolds = len(walk.folds.arrays(threads))
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
                for x in (inner if i == chosen else [_compat.zeros(t) for t in types])
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
    walk.folds.restore(threads, list(flat), certain)
    return own


def _merged(*tokens: Token | None) -> Token | None:
    """What a result of several branches stands for, if it is a token in any of them."""
    some = [t for t in tokens if t is not None]
    if not some:
        return None
    return Token(frozenset().union(*(t.calls for t in some)), any(t.array for t in some))


@handles("custom_jvp_call", "CustomJVPTraced", "RematTraced")
def _custom_jvp(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """The values come from the body; the derivative of its results is that of the custom rule."""
    body = _compat.call_body(eqn)
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads)
    inner = jaxpr_as_fun(staged.jaxpr)
    count, n = staged.count, len(staged.ins.kept)

    @jax.custom_jvp
    def call(*flat: Any) -> list[Any]:
        return inner(*flat)

    @call.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        def plain(*flat: Any) -> Any:
            with unmarked():
                return _compat.bind_equation(eqn, flat)

        _, out = jax.jvp(plain, primals[:n], tangents[:n])
        results, inside = jax.jvp(inner, primals, tangents)
        return results, [*out, *inside[count:]]

    return walk.unstage(staged, call(*staged.ins.arrays(args), *walk.folds.arrays(threads)))


@handles("custom_vjp_call", "custom_vjp_call_jaxpr", "CustomVJPTraced")
def _custom_vjp(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """As for `custom_jvp`: what is recorded has its own derivative, the results the custom one."""
    body = _compat.call_body(eqn)
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads)
    inner = jaxpr_as_fun(staged.jaxpr)
    count, n = staged.count, len(staged.ins.kept)

    def plain(*flat: Any) -> Any:
        with unmarked():
            return _compat.bind_equation(eqn, flat)

    @jax.custom_vjp
    def call(*flat: Any) -> list[Any]:
        return inner(*flat)

    def forward(*flat: Any) -> Any:
        out, back = jax.vjp(plain, *flat[:n])
        inside, back_inside = jax.vjp(lambda *flat: inner(*flat)[count:], *flat)
        return [*out, *inside], (back, back_inside)

    def backward(residuals: Any, cts: Any) -> Any:
        back, back_inside = residuals
        through, inside = back(list(cts[:count])), back_inside(list(cts[count:]))
        return (*(_add(a, b) for a, b in zip(through, inside, strict=False)), *inside[n:])

    call.defvjp(forward, backward)
    return walk.unstage(staged, call(*staged.ins.arrays(args), *walk.folds.arrays(threads)))


def _add(a: Any, b: Any) -> Any:
    return a if a.dtype == jax.dtypes.float0 else a + b


@handles("custom_linear_solve", "linear_solve")
def _linear_solve(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """What the solver marks comes out as the auxiliary result that solvers may have."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    args = walk.materialize(eqn.invars, args)
    consts, at = {}, 0
    for name, length in zip(lengths._fields, lengths, strict=True):
        consts[name], at = args[at : at + length], at + length
    b = args[at:]
    threads = walk.enter(jaxprs.solve)
    staged = walk.stage(jaxprs.solve, [*consts["solve"], *b], threads)
    nested = walk.folds.arrays(threads)

    def apply(name: str) -> Any:
        jaxpr = getattr(jaxprs, name)
        return lambda x: jaxpr_as_fun(strip(jaxpr))(*consts[name], *x)

    def solve(_: Any, b: Any) -> Any:
        results = jaxpr_as_fun(staged.jaxpr)(*consts["solve"], *b, *nested)
        return results[: len(b)], results[len(b) :]

    def transposed(_: Any, b: Any) -> Any:
        results = apply("transpose_solve")(b)
        rest = _compat.open_jaxpr(staged.jaxpr).outvars[len(b) :]
        return results[: len(b)], [_compat.zeros(v.aval) for v in rest]

    x, aux = jax.lax.custom_linear_solve(
        apply("matvec"),
        list(b),
        solve,
        transposed if jaxprs.transpose_solve is not None else None,
        has_aux=True,
    )
    return walk.unstage(staged, [*x, *aux])


@handles("shard_map")
def _shard_map(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """Each device's part comes along a new leading axis for each mesh axis that it varies over."""
    params = eqn.params
    body, mesh = params["jaxpr"], params["mesh"]
    order = [a for a in mesh.axis_names if a in params["newly_manual_axes"]]
    ins = Slots.of(args)
    cell: dict[str, Any] = {}

    def local(*flat: Any) -> list[Any]:
        with walk.inside():
            walk.folds.items = {}
            outs = walk.run(body, ins.fill(iter(flat)))
            entries = [*walk.entries, *walk.fold_entries()]
            cell.update(outs=Slots.of(outs), entries=tuple(e.bare for e in entries))
            return [*cell["outs"].arrays(outs), *(a for e in entries for a in e.arrays)]

    def trace(*flat: Any) -> tuple[()]:
        cell["jaxpr"] = jax.make_jaxpr(local)(*flat)
        return ()

    # What leaves the body, and over which axes it varies, is known once the body was walked; and
    # that can be done only where its axes have a meaning.
    options: dict[str, Any] = {
        "mesh": mesh,
        "in_specs": tuple(params["in_specs"][i] for i in ins.kept),
        "axis_names": frozenset(order),
        "check_vma": params["check_vma"],
    }
    operands = ins.arrays(args)
    jax.eval_shape(jax.shard_map(trace, out_specs=(), **options), *operands)
    outs, entries = cell["outs"], cell["entries"]
    own = len(outs.kept)
    avals = [v.aval for v in _compat.open_jaxpr(cell["jaxpr"]).outvars[own:]]

    def axes_of(aval: Any) -> tuple[str, ...]:
        varying = _compat.varying_axes(aval) if params["check_vma"] else frozenset(order)
        return tuple(a for a in order if a in varying)

    over = [axes_of(aval) for aval in avals]

    def spread(*flat: Any) -> list[Any]:
        results = jaxpr_as_fun(cell["jaxpr"])(*flat)
        extra = [
            x.reshape((1,) * len(axes) + x.shape)
            for x, axes in zip(results[own:], over, strict=True)
        ]
        return [*results[:own], *extra]

    specs = [params["out_specs"][i] for i in outs.kept]
    out_specs = [*specs, *(PartitionSpec(*axes) for axes in over)]
    flat = iter(jax.shard_map(spread, out_specs=out_specs, **options)(*operands))
    results = outs.fill(flat)
    axes = iter(over)
    for entry in entries:
        first, *_ = [next(axes) for _ in entry.arrays]
        walk.entries.append(
            entry.with_arrays(flat)._replace(
                lead=entry.lead + len(first),
                loops=(*(f"{a}[{mesh.shape[a]}]" for a in first), *entry.loops),
            )
        )
    return results
