"""Handlers that carry origins through loops, branches, remat and shard_map: see `_origins`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from tapax import _jax
from tapax._marks.marked_jaxprs import strip
from tapax._walk.entries import where
from tapax.nonfinite._equation_numbers import REMATS, is_inexact
from tapax.nonfinite._frames import (
    NONE,
    FrameInputs,
    Origin,
    OriginFrame,
    Origins,
    badness,
    earlier_rows,
    finite_rows,
)
from tapax.nonfinite._origins import Handler, OriginWalk, ValuesAndOrigins


def _inexact_places(values: Sequence[Any]) -> list[int]:
    """The places of the values that can be bad."""
    return [i for i, x in enumerate(values) if is_inexact(jax.typeof(x))]


def _scatter(count: int, places: Sequence[int], origins: Sequence[Origin]) -> Origins:
    """A list of `count` origins: those given at their places, None elsewhere."""
    out: Origins = [None] * count
    for i, origin in zip(places, origins, strict=True):
        out[i] = origin
    return out


def _follow_scan(
    walk: OriginWalk, eqn: Any, args: list[Any], origins: Origins, number: int, frame: OriginFrame
) -> ValuesAndOrigins:
    params = eqn.params
    body, length = params["jaxpr"], params["length"]
    nconsts, ncarry = _jax.scan_split(params)
    carried = slice(nconsts, nconsts + ncarry)
    consts, init, xs = args[:nconsts], args[carried], args[nconsts + ncarry :]
    moving = _inexact_places(init)
    const_at = [i for i in range(nconsts) if origins[i] is not None]
    x_at = [i for i in range(len(xs)) if origins[nconsts + ncarry + i] is not None]
    outer = lambda places: _outer_rows(frame, [origins[i] for i in places])  # noqa: E731
    const_rows = outer(const_at)
    x_rows = outer([nconsts + ncarry + i for i in x_at])
    start = outer([nconsts + i for i in moving])
    outs = _jax.open_jaxpr(body).outvars
    y_at = [i for i, v in enumerate(outs[ncarry:]) if is_inexact(v.aval)]
    seen = frame.vary(finite_rows(len(y_at) + 1, frame.width))

    def step(carry: Any, x: Any) -> Any:
        state, rows, best, count = carry
        given = _frame_inputs(frame, [const_rows, rows, x_rows])
        inner = frame.loop_frame()
        local = iter(inner.add_known(given.origins))
        before = [
            *_scatter(nconsts, const_at, [next(local) for _ in const_at]),
            *_scatter(ncarry, moving, [next(local) for _ in moving]),
            *_scatter(len(x), x_at, [_part_origin(x[i], next(local), inner) for i in x_at]),
        ]
        results, found = walk.run_body(body, [*consts, *state, *x], before, 0, inner)
        wanted = (
            [found[i] for i in moving] + [found[ncarry + i] for i in y_at] + [walk.first_bad(inner)]
        )
        left = given.rows_outside(inner, inner.pack(wanted), number, count)
        best = earlier_rows(best, left[len(moving) :])
        new = [jnp.asarray(r) for r in results[:ncarry]]
        rows = _carried_rows(frame, left, moving)
        return (new, rows, frame.vary(best), count + 1), results[ncarry:]

    carry = ([jnp.asarray(x) for x in init], start, seen, jnp.int32(0))
    (state, rows, best, _), ys = lax.scan(
        step, carry, list(xs), length=length, reverse=params["reverse"], unroll=params["unroll"]
    )
    found = frame.add_results(number, best if rows is None else jnp.concatenate([rows, best]))
    own = [
        *_scatter(ncarry, moving, found[: len(moving)]),
        *_scatter(len(ys), y_at, found[len(moving) : -1]),
    ]
    return [*state, *ys], own


def _frame_inputs(frame: OriginFrame, rows: Sequence[Any]) -> FrameInputs:
    """The inputs of an iteration, at least one row: some compilers fail on empty arrays."""
    some = [r for r in rows if r is not None]
    return FrameInputs(jnp.concatenate(some) if some else frame.vary(finite_rows(1, frame.width)))


def _outer_rows(frame: OriginFrame, origins: Sequence[Origin]) -> Any:
    """The rows, in a loop, of what comes from around it: what is in a table has its number."""
    if not origins:
        return None
    return jnp.pad(frame.pack(origins)[:, None], ((0, 0), (0, frame.width - 1)))


def _carried_rows(frame: OriginFrame, rows: Any, places: Sequence[int]) -> Any:
    return frame.vary(rows[: len(places)]) if places else None


def _part_origin(x: Any, origin: Origin, frame: OriginFrame) -> Origin:
    """The origin of a part of a value, which may well be finite."""
    return frame.add([origin], badness(x), NONE)


def _follow_while(
    walk: OriginWalk, eqn: Any, args: list[Any], origins: Origins, number: int, frame: OriginFrame
) -> ValuesAndOrigins:
    params = eqn.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    ntest, nbody = params["cond_nconsts"], params["body_nconsts"]
    tconsts, bconsts, init = args[:ntest], args[ntest : ntest + nbody], args[ntest + nbody :]
    mapped = bool(_jax.open_jaxpr(test).outvars[0].aval.shape)
    moving = _inexact_places(init)
    const_at = [i for i in range(nbody) if origins[ntest + i] is not None]
    const_rows = _outer_rows(frame, [origins[ntest + i] for i in const_at])
    start = _outer_rows(frame, [origins[ntest + nbody + i] for i in moving])

    def goes_on(state: Any) -> Any:
        return jaxpr_as_fun(strip(test))(*tconsts, *state)[0]

    def check(carry: Any) -> Any:
        go = goes_on(carry[0])
        return jnp.any(go) if mapped else go

    def step(carry: Any) -> Any:
        state, rows, best, count = carry
        given = _frame_inputs(frame, [const_rows, rows])
        inner = frame.loop_frame()
        local = iter(inner.add_known(given.origins))
        before = [
            *_scatter(nbody, const_at, [next(local) for _ in const_at]),
            *_scatter(len(state), moving, [next(local) for _ in moving]),
        ]
        new, found = walk.run_body(body, [*bconsts, *state], before, 0, inner)
        if mapped:
            # An example that is done keeps its state: so JAX itself lowers such a loop.
            go = goes_on(state)
            kept = [where(go, jnp.asarray(x), y) for x, y in zip(new, state, strict=True)]
            for i in moving:
                now = where(go, jnp.asarray(new[i]), jnp.zeros_like(new[i]))
                old = where(~go, state[i], jnp.zeros_like(state[i]))
                new_origin = _part_origin(now, found[i], inner)
                old_origin = _part_origin(old, before[nbody + i], inner)
                found[i] = inner.add([new_origin, old_origin], None, NONE)
            new = kept
        wanted = [*(found[i] for i in moving), walk.first_bad(inner)]
        left = given.rows_outside(inner, inner.pack(wanted), number, count)
        best = earlier_rows(best, left[len(moving) :])
        new = [jnp.asarray(x) for x in new]
        return new, _carried_rows(frame, left, moving), frame.vary(best), count + 1

    seen = frame.vary(finite_rows(1, frame.width))
    carry = ([jnp.asarray(x) for x in init], start, seen, jnp.int32(0))
    state, rows, best, _ = lax.while_loop(check, step, carry)
    found = frame.add_results(number, best if rows is None else jnp.concatenate([rows, best]))
    return list(state), _scatter(len(init), moving, found[:-1])


class _StagedBody:
    """A jaxpr of a body inside a frame; it returns results, their origins, and the tables."""

    def __init__(
        self, walk: OriginWalk, jaxpr: Any, args: Any, origins: Any, base: int, frame: OriginFrame
    ):
        self.places = [i for i, o in enumerate(origins) if o is not None]
        cell: dict[str, Any] = {}

        def body(packed: Any, *args: Any) -> list[Any]:
            inner = frame.inline_frame()
            known = inner.add_known(packed)[: len(self.places)]
            before = _scatter(len(args), self.places, known)
            outs, found = walk.run_body(jaxpr, args, before, base, inner)
            cell["slots"] = inner.slots
            return [
                *map(jnp.asarray, outs),
                frame.vary(inner.pack([*found, walk.first_bad(inner)])),
                *map(frame.vary, inner.tables),
            ]

        self.operands = [frame.pack([origins[i] for i in self.places] or [None]), *args]
        self.jaxpr = jax.make_jaxpr(body)(*self.operands)
        self.slots: list[int] = cell["slots"]
        self.own = _jax.open_jaxpr(jaxpr).outvars


def _split_results(
    part: _StagedBody, results: Sequence[Any], frame: OriginFrame
) -> ValuesAndOrigins:
    """Split what a staged body returned into results and origins; the tables are left out."""
    own = len(part.own)
    found = frame.add_known(results[own])
    origins = [
        o if is_inexact(v.aval) else None for o, v in zip(found[:own], part.own, strict=True)
    ]
    return list(results[:own]), origins


def _follow_remat(
    walk: OriginWalk, eqn: Any, args: list[Any], origins: Origins, number: int, frame: OriginFrame
) -> ValuesAndOrigins:
    """Bind the remat as a remat, so that it still drops what it should drop."""
    params = dict(eqn.params)
    part = _StagedBody(walk, params["jaxpr"], args, origins, number + 1, frame)
    jaxpr, consts = _jax.closed(part.jaxpr)
    if isinstance(params["prevent_cse"], tuple):
        params["prevent_cse"] = (*(False for _ in consts), False, *params["prevent_cse"])
    params["jaxpr"] = jaxpr
    results = eqn.primitive.bind(*consts, *part.operands, **params)
    frame.slots += part.slots
    frame.tables += results[len(part.own) + 1 :]
    return _split_results(part, results, frame)


def _follow_cond(
    walk: OriginWalk, eqn: Any, args: list[Any], origins: Origins, number: int, frame: OriginFrame
) -> ValuesAndOrigins:
    index, *values = args
    starts = walk.equations.body_starts(eqn, number)
    parts = [
        _StagedBody(walk, branch, values, origins[1:], start, frame)
        for branch, start in zip(eqn.params["branches"], starts, strict=True)
    ]
    own = len(parts[0].own)
    kept = [[v.aval for v in _jax.open_jaxpr(p.jaxpr).outvars[own + 1 :]] for p in parts]

    def padded(chosen: int) -> Any:
        def branch(*flat: Any) -> list[Any]:
            results = jaxpr_as_fun(parts[chosen].jaxpr)(*flat)
            tables = [
                t
                for i, types in enumerate(kept)
                for t in (results[own + 1 :] if i == chosen else map(_jax.zeros, types))
            ]
            return [*results[: own + 1], *tables]

        return jax.make_jaxpr(branch)(*parts[chosen].operands)

    branches = tuple(padded(i) for i in range(len(parts)))
    results = eqn.primitive.bind(index, *parts[0].operands, **dict(eqn.params, branches=branches))
    frame.slots += [slot for part in parts for slot in part.slots]
    frame.tables += results[own + 1 :]
    return _split_results(parts[0], results, frame)


def _follow_shard_map(
    walk: OriginWalk, eqn: Any, args: list[Any], origins: Origins, number: int, frame: OriginFrame
) -> ValuesAndOrigins:
    """Track origins on each device; outside, the earliest of all devices counts."""
    params = eqn.params
    body, mesh, typed = params["jaxpr"], params["mesh"], params["check_vma"]
    order = [a for a in mesh.axis_names if a in params["newly_manual_axes"]]
    here = frame.axes | frozenset(order)
    places = [i for i, o in enumerate(origins) if o is not None]
    out_at = [i for i, v in enumerate(_jax.open_jaxpr(body).outvars) if is_inexact(v.aval)]

    def local(rows: Any, *flat: Any) -> list[Any]:
        inner = frame.loop_frame()
        inner.axes, inner.typed = here, (here if typed else frozenset())
        given = FrameInputs(inner.vary(rows))
        names = inner.add_known(given.origins)[: len(places)]
        known = [_part_origin(flat[i], o, inner) for i, o in zip(places, names, strict=True)]
        outs, found = walk.run_body(body, flat, _scatter(len(flat), places, known), 0, inner)
        device = jnp.int32(0)
        for axis in order:
            device = device * mesh.shape[axis] + lax.axis_index(axis)
        packed = inner.pack([*(found[i] for i in out_at), walk.first_bad(inner)])
        left = inner.vary(given.rows_outside(inner, packed, number, 0, device.astype(jnp.int32)))
        return [*outs, left.reshape((1,) * len(order) + left.shape)]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), *params["in_specs"]),
        out_specs=[*params["out_specs"], PartitionSpec(*order)],
        axis_names=frozenset(order),
        check_vma=typed,
    )
    rows = _outer_rows(frame, [origins[i] for i in places])
    rows = frame.vary(finite_rows(1, frame.width)) if rows is None else rows
    *outs, rows = mapped(rows, *args)
    rows = rows.reshape((-1, *rows.shape[len(order) :]))
    while rows.shape[0] > 1:
        if rows.shape[0] % 2:
            rows = jnp.concatenate([rows, rows[-1:]])
        rows = earlier_rows(rows[0::2], rows[1::2])
    found = frame.add_results(number, rows[0])
    return list(outs), _scatter(len(outs), out_at, found[:-1])


class OriginSearch(OriginWalk):
    """The evaluation with a handler for every kind of equation whose body is staged again."""

    handlers: ClassVar[Mapping[str, Handler]] = {
        "scan": _follow_scan,
        "while": _follow_while,
        "cond": _follow_cond,
        "shard_map": _follow_shard_map,
        **dict.fromkeys(REMATS, _follow_remat),
    }
