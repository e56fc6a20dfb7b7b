"""Handlers of the equations that have bodies: how each is re-staged so that its taps come out.

A handler takes the walk, the equation and its operands, and returns the equation's results. It
drops the operands that are tokens, has the body walked, binds the equation again with the new
body, and says what leaving that body does to the entries recorded inside.

Adding a primitive is adding a function here, under its name, and a test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jaxtap import _compat
from jaxtap._mark import unmarked
from jaxtap._sites import SiteError, StepSlice
from jaxtap._walk import Entry, Token, Walk, eager, handles, strip


@handles("jit", "pjit")
def _jit(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    params = dict(eqn.params)
    body = params["jaxpr"]
    if eager():
        return walk.run(body, args)
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads)
    folds = walk.folds.arrays(threads)
    own = [token is None for token in staged.outs]
    more = len(_compat.open_jaxpr(staged.jaxpr).outvars) - staged.count

    def inputs(name: str, fill: Any) -> tuple[Any, ...]:
        return (*(params[name][i] for i in staged.real), *(fill for _ in folds))

    def outputs(name: str, fill: Any) -> tuple[Any, ...]:
        kept = (p for p, keep in zip(params[name], own, strict=True) if keep)
        return (*kept, *(fill for _ in range(more)))

    params.update(
        jaxpr=staged.jaxpr,
        donated_invars=inputs("donated_invars", False),
        in_shardings=inputs("in_shardings", _compat.UNSPECIFIED),
        in_layouts=inputs("in_layouts", None),
        out_shardings=outputs("out_shardings", _compat.UNSPECIFIED),
        out_layouts=outputs("out_layouts", None),
    )
    results = eqn.primitive.bind(*(args[i] for i in staged.real), *folds, **params)
    return walk.unstage(staged, results)


@handles("closed_call", "core_call", "call", "eval_jaxpr", "core_closed_call")
def _call(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    (name,) = (k for k in eqn.params if k in ("call_jaxpr", "jaxpr"))
    body = eqn.params[name]
    if eager() or not hasattr(body, "consts"):
        return walk.run(body, args)
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads)
    operands = [*(args[i] for i in staged.real), *walk.folds.arrays(threads)]
    bound = eqn.replace(params={**eqn.params, name: staged.jaxpr})
    return walk.unstage(staged, _compat.bind_equation(bound, operands))


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
        kept = (params["prevent_cse"][i] for i in staged.real)
        params["prevent_cse"] = (*(False for _ in consts), *kept, *(False for _ in folds))
    params["jaxpr"] = jaxpr
    results = eqn.primitive.bind(*consts, *(args[i] for i in staged.real), *folds, **params)
    return walk.unstage(staged, results)


@handles("scan")
def _scan(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    params = eqn.params
    body, length = params["jaxpr"], params["length"]
    nconsts, ncarry = _compat.scan_split(params)
    consts, init, xs = args[:nconsts], args[nconsts : nconsts + ncarry], args[nconsts + ncarry :]
    init = walk.materialize(eqn.invars[nconsts : nconsts + ncarry], init)
    threads = walk.enter(body)
    cell: dict[str, Any] = {}

    def step(carry: Any, x: Any) -> Any:
        state, folds = carry
        slices = iter(x)
        operands = [a if type(a) is Token else next(slices) for a in xs]
        with walk.inside():
            walk.folds.restore(threads, folds)
            outs = walk.run(body, [*consts, *state, *operands])
            carried = walk.materialize(_compat.open_jaxpr(body).outvars[:ncarry], outs[:ncarry])
            ys = outs[ncarry:]
            cell["ys"] = [y if type(y) is Token else None for y in ys]
            cell["entries"] = tuple(walk.entries)
            real = [y for y in ys if type(y) is not Token]
            arrays = [a for e in walk.entries for a in e.arrays]
            # A value that the backward pass keeps anyway is stacked once.
            stacked = {id(y): y for y in (*real, *arrays)}
            cell["places"] = [list(stacked).index(id(y)) for y in (*real, *arrays)]
            cell["certain"] = walk.folds.certain(threads) if length else ()
            return (carried, walk.folds.arrays(threads)), list(stacked.values())

    (carried, folds), stacked = jax.lax.scan(
        step,
        (list(init), walk.folds.arrays(threads)),
        [a for a in xs if type(a) is not Token],
        length=length,
        reverse=params["reverse"],
        unroll=params["unroll"],
        **({"_split_transpose": True} if params.get("_split_transpose") else {}),
    )
    walk.folds.restore(threads, folds, cell["certain"])
    flat = (stacked[i] for i in cell["places"])
    ys = [next(flat) if y is None else y for y in cell["ys"]]
    for entry in cell["entries"]:
        walk.entries.append(_stacked(entry.with_arrays(flat), f"scan[{length}]"))
    return [*carried, *ys]


def _stacked(entry: Entry, loop: str) -> Entry:
    """An entry that a loop has stacked; the iterations asked for of it, where some were."""
    if entry.step is not None and not entry.loops:
        index = entry.step.slice if isinstance(entry.step, StepSlice) else entry.step
        length = entry.value.shape[0]
        if isinstance(index, int) and not -length <= index < length:
            raise SiteError(
                f"step={index} was asked for of the site {entry.site.name!r}, marked at "
                f"{entry.site.source}, but its loop has {length} iterations."
            )
        entry = dataclasses.replace(
            entry,
            value=entry.value[index],
            valid=None if entry.valid is None else entry.valid[index],
            lead=entry.lead + isinstance(index, slice),
            step=None,
        )
    else:
        entry = dataclasses.replace(entry, lead=entry.lead + 1)
    return dataclasses.replace(entry, loops=(loop, *entry.loops))


@handles("cond")
def _cond(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    index, *operands = args
    branches = eqn.params["branches"]
    threads = walk.enter(*branches)
    parts = [walk.stage(b, operands, threads, branch=i) for i, b in enumerate(branches)]
    folds = walk.folds.arrays(threads)
    real = [a for a in operands if type(a) is not Token]
    # Residuals of one place may be a token in one branch and an empty filling in another.
    outs = list(zip(*(part.outs for part in parts), strict=True))
    tokens = [
        Token(frozenset().union(*(t.calls for t in out if t is not None)))
        if any(t is not None for t in out)
        else None
        for out in outs
    ]
    types = [[v.aval for v in _compat.open_jaxpr(p.jaxpr).outvars[p.count :]] for p in parts]
    arrays = [t[: len(t) - len(folds)] for t in types]

    def padded(chosen: int) -> Any:
        part = parts[chosen]

        def branch(*flat: Any) -> list[Any]:
            results = jaxpr_as_fun(part.jaxpr)(*flat)
            own = iter(results[: part.count])
            kept = []
            for token, merged in zip(part.outs, tokens, strict=True):
                value = next(own) if token is None else None
                if merged is None:
                    kept.append(value)
            inner = results[part.count : len(results) - len(folds)]
            filled = [
                x
                for i, held in enumerate(arrays)
                for x in (inner if i == chosen else [_compat.zeros(t) for t in held])
            ]
            return [*kept, *filled, *results[len(results) - len(folds) :]]

        return branch

    functions = [padded(i) for i in range(len(parts))]
    if eager() and not isinstance(index, Tracer):
        results = functions[int(index)](*real, *folds)
    else:
        made = tuple(jax.make_jaxpr(f)(*real, *folds) for f in functions)
        results = eqn.primitive.bind(index, *real, *folds, **dict(eqn.params, branches=made))
    flat = iter(results)
    own = [next(flat) if token is None else token for token in tokens]
    for i, part in enumerate(parts):
        ran = jnp.asarray(index) == i
        for entry in part.entries:
            entry = entry.with_arrays(flat)
            if entry.valid is None:
                entry = dataclasses.replace(entry, valid=ran)
            walk.entries.append(entry)
    certain = [all(seen) for seen in zip(*(part.certain for part in parts), strict=True)]
    walk.folds.restore(threads, list(flat), certain)
    return own


@handles("custom_jvp_call")
def _custom_jvp(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """The values come from the body; the derivative of its results is that of the custom rule."""
    body = eqn.params["call_jaxpr"]
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads)
    inner = jaxpr_as_fun(staged.jaxpr)
    count, n = staged.count, len(staged.real)

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

    return walk.unstage(staged, call(*(args[i] for i in staged.real), *walk.folds.arrays(threads)))


@handles("custom_vjp_call", "custom_vjp_call_jaxpr")
def _custom_vjp(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """As for `custom_jvp`: what is recorded has its own derivative, the results the custom one."""
    body = eqn.params["call_jaxpr"]
    threads = walk.enter(body)
    staged = walk.stage(body, args, threads)
    inner = jaxpr_as_fun(staged.jaxpr)
    count, n = staged.count, len(staged.real)

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
    return walk.unstage(staged, call(*(args[i] for i in staged.real), *walk.folds.arrays(threads)))


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
    real = [i for i, a in enumerate(args) if type(a) is not Token]
    for path, held in walk.folds.held(body, (), walk.scopes).items():
        if path in walk.folds.items:
            raise SiteError(
                f"The site {path!r}, marked at {held.mark.source}, is folded inside a "
                "shard_map and outside of it. Give the two another name each: inside, every "
                "device has a fold of its own."
            )
    cell: dict[str, Any] = {}

    def local(*flat: Any) -> list[Any]:
        operands = list(args)
        for i, x in zip(real, flat, strict=True):
            operands[i] = x
        with walk.inside():
            threads = walk.enter(body)
            outs = walk.run(body, operands)
            arrays = [*(a for e in walk.entries for a in e.arrays), *walk.folds.arrays(threads)]
            cell.update(
                outs=[o if type(o) is Token else None for o in outs],
                entries=tuple(walk.entries),
                threads=threads,
                folds={t.path: walk.folds.items[t.path] for t in threads},
            )
            return [*(o for o in outs if type(o) is not Token), *arrays]

    def trace(*flat: Any) -> tuple[()]:
        cell["jaxpr"] = jax.make_jaxpr(local)(*flat)
        return ()

    # What leaves the body, and over which axes it varies, is known once the body was walked; and
    # that can be done only where its axes have a meaning.
    options: dict[str, Any] = {
        "mesh": mesh,
        "in_specs": tuple(params["in_specs"][i] for i in real),
        "axis_names": frozenset(order),
        "check_vma": params["check_vma"],
    }
    operands = [args[i] for i in real]
    jax.eval_shape(jax.shard_map(trace, out_specs=(), **options), *operands)
    outs, entries = cell["outs"], cell["entries"]
    own = sum(token is None for token in outs)
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

    specs = [s for s, token in zip(params["out_specs"], outs, strict=True) if token is None]
    out_specs = [*specs, *(PartitionSpec(*axes) for axes in over)]
    flat = iter(jax.shard_map(spread, out_specs=out_specs, **options)(*operands))
    results = [next(flat) if token is None else token for token in outs]
    axes = iter(over)
    for entry in entries:
        first, *_ = [next(axes) for _ in entry.arrays]
        walk.entries.append(
            dataclasses.replace(
                entry.with_arrays(flat),
                lead=entry.lead + len(first),
                loops=(*(f"{a}[{mesh.shape[a]}]" for a in first), *entry.loops),
            )
        )
    walk.folds.items = {**walk.folds.items, **cell["folds"]}
    certain = walk.folds.certain(cell["threads"])
    walk.folds.restore(cell["threads"], list(flat), certain)
    return results
