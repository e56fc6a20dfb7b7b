"""How origins go through loops, branches, remat and shard_map: see `_origins`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from tapax import _jax
from tapax._marks.marked_jaxprs import strip
from tapax._walk.entries import where
from tapax.nonfinite._frames import NONE, Frame, Handed, Origin, badness, nowhere, sooner
from tapax.nonfinite._layout import REMATS, checked
from tapax.nonfinite._origins import HANDLERS, Handler, Search

Found = tuple[list[Any], list[Origin]]


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _tracked(values: Sequence[Any]) -> list[int]:
    """Which of some values can be bad."""
    return [i for i, x in enumerate(values) if checked(jax.typeof(x))]


def _spread(count: int, places: Sequence[int], origins: Sequence[Origin]) -> list[Origin]:
    """Origins at their places, and none elsewhere."""
    out: list[Origin] = [None] * count
    for i, origin in zip(places, origins, strict=True):
        out[i] = origin
    return out


@_handles("scan")
def _scan(
    search: Search, eqn: Any, args: list[Any], origins: list[Origin], number: int, frame: Frame
) -> Found:
    params = eqn.params
    body, length = params["jaxpr"], params["length"]
    nconsts, ncarry = _jax.scan_split(params)
    carried = slice(nconsts, nconsts + ncarry)
    consts, init, xs = args[:nconsts], args[carried], args[nconsts + ncarry :]
    moving = _tracked(init)
    const_at = [i for i in range(nconsts) if origins[i] is not None]
    x_at = [i for i in range(len(xs)) if origins[nconsts + ncarry + i] is not None]
    outer = lambda places: _outer_rows(frame, [origins[i] for i in places])  # noqa: E731
    const_rows = outer(const_at)
    x_rows = outer([nconsts + ncarry + i for i in x_at])
    start = outer([nconsts + i for i in moving])
    outs = _jax.open_jaxpr(body).outvars
    y_at = [i for i, v in enumerate(outs[ncarry:]) if checked(v.aval)]
    seen = frame.same(nowhere(len(y_at) + 1, frame.width))

    def step(carry: Any, x: Any) -> Any:
        state, rows, best, count = carry
        given = _handed(frame, [const_rows, rows, x_rows])
        inner = frame.within()
        local = iter(inner.known(given.origins))
        before = [
            *_spread(nconsts, const_at, [next(local) for _ in const_at]),
            *_spread(ncarry, moving, [next(local) for _ in moving]),
            *_spread(len(x), x_at, [_if_bad(x[i], next(local), inner) for i in x_at]),
        ]
        results, found = search.body(body, [*consts, *state, *x], before, 0, inner)
        wanted = (
            [found[i] for i in moving] + [found[ncarry + i] for i in y_at] + [search.first(inner)]
        )
        left = given.leaving(inner, inner.packed(wanted), number, count)
        best = sooner(best, left[len(moving) :])
        new = [jnp.asarray(r) for r in results[:ncarry]]
        return (new, _first(frame, left, moving), frame.same(best), count + 1), results[ncarry:]

    carry = ([jnp.asarray(x) for x in init], start, seen, jnp.int32(0))
    (state, rows, best, _), ys = lax.scan(
        step, carry, list(xs), length=length, reverse=params["reverse"], unroll=params["unroll"]
    )
    found = frame.results(number, best if rows is None else jnp.concatenate([rows, best]))
    own = [
        *_spread(ncarry, moving, found[: len(moving)]),
        *_spread(len(ys), y_at, found[len(moving) : -1]),
    ]
    return [*state, *ys], own


def _handed(frame: Frame, rows: Sequence[Any]) -> Handed:
    """What an iteration is handed. There is always something: some compilers fall over nothing."""
    some = [r for r in rows if r is not None]
    return Handed(jnp.concatenate(some) if some else frame.same(nowhere(1, frame.width)))


def _outer_rows(frame: Frame, origins: Sequence[Origin]) -> Any:
    """The rows, in a loop, of what comes from around it: what is in a table has its number."""
    if not origins:
        return None
    return jnp.pad(frame.packed(origins)[:, None], ((0, 0), (0, frame.width - 1)))


def _first(frame: Frame, rows: Any, places: Sequence[int]) -> Any:
    return frame.same(rows[: len(places)]) if places else None


def _if_bad(x: Any, origin: Origin, frame: Frame) -> Origin:
    """The origin of a part of a value, which may well be finite."""
    return frame.add([origin], badness(x), NONE)


@_handles("while")
def _while(
    search: Search, eqn: Any, args: list[Any], origins: list[Origin], number: int, frame: Frame
) -> Found:
    params = eqn.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    ntest, nbody = params["cond_nconsts"], params["body_nconsts"]
    tconsts, bconsts, init = args[:ntest], args[ntest : ntest + nbody], args[ntest + nbody :]
    mapped = bool(_jax.open_jaxpr(test).outvars[0].aval.shape)
    moving = _tracked(init)
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
        given = _handed(frame, [const_rows, rows])
        inner = frame.within()
        local = iter(inner.known(given.origins))
        before = [
            *_spread(nbody, const_at, [next(local) for _ in const_at]),
            *_spread(len(state), moving, [next(local) for _ in moving]),
        ]
        new, found = search.body(body, [*bconsts, *state], before, 0, inner)
        if mapped:
            # An example that is done keeps its state: so JAX itself lowers such a loop.
            go = goes_on(state)
            kept = [where(go, jnp.asarray(x), y) for x, y in zip(new, state, strict=True)]
            for i in moving:
                now = where(go, jnp.asarray(new[i]), jnp.zeros_like(new[i]))
                old = where(~go, state[i], jnp.zeros_like(state[i]))
                parts = [_if_bad(now, found[i], inner), _if_bad(old, before[nbody + i], inner)]
                found[i] = inner.add(parts, None, NONE)
            new = kept
        wanted = [*(found[i] for i in moving), search.first(inner)]
        left = given.leaving(inner, inner.packed(wanted), number, count)
        best = sooner(best, left[len(moving) :])
        new = [jnp.asarray(x) for x in new]
        return new, _first(frame, left, moving), frame.same(best), count + 1

    seen = frame.same(nowhere(1, frame.width))
    carry = ([jnp.asarray(x) for x in init], start, seen, jnp.int32(0))
    state, rows, best, _ = lax.while_loop(check, step, carry)
    found = frame.results(number, best if rows is None else jnp.concatenate([rows, best]))
    return list(state), _spread(len(init), moving, found[:-1])


class _Part:
    """A body that is part of a frame, staged: results, their origins, and tables out."""

    def __init__(
        self, search: Search, jaxpr: Any, args: Sequence[Any], origins: Any, base: int, frame: Frame
    ):
        self.places = [i for i, o in enumerate(origins) if o is not None]
        cell: dict[str, Any] = {}

        def body(packed: Any, *args: Any) -> list[Any]:
            inner = frame.fork()
            known = inner.known(packed)[: len(self.places)]
            before = _spread(len(args), self.places, known)
            outs, found = search.body(jaxpr, args, before, base, inner)
            cell["slots"] = inner.slots
            return [
                *map(jnp.asarray, outs),
                frame.same(inner.packed([*found, search.first(inner)])),
                *map(frame.same, inner.tables),
            ]

        self.operands = [frame.packed([origins[i] for i in self.places] or [None]), *args]
        self.jaxpr = jax.make_jaxpr(body)(*self.operands)
        self.slots: list[int] = cell["slots"]
        self.own = _jax.open_jaxpr(jaxpr).outvars


def _taken(part: _Part, results: Sequence[Any], frame: Frame) -> Found:
    """Takes apart what a staged body gave, but for its tables."""
    own = len(part.own)
    found = frame.known(results[own])
    origins = [o if checked(v.aval) else None for o, v in zip(found[:own], part.own, strict=True)]
    return list(results[:own]), origins


@_handles(*REMATS)
def _remat(
    search: Search, eqn: Any, args: list[Any], origins: list[Origin], number: int, frame: Frame
) -> Found:
    """Bound again as the remat it is, else it would keep what it should drop."""
    params = dict(eqn.params)
    part = _Part(search, params["jaxpr"], args, origins, number + 1, frame)
    jaxpr, consts = _jax.closed(part.jaxpr)
    if isinstance(params["prevent_cse"], tuple):
        params["prevent_cse"] = (*(False for _ in consts), False, *params["prevent_cse"])
    params["jaxpr"] = jaxpr
    results = eqn.primitive.bind(*consts, *part.operands, **params)
    frame.slots += part.slots
    frame.tables += results[len(part.own) + 1 :]
    return _taken(part, results, frame)


@_handles("cond")
def _cond(
    search: Search, eqn: Any, args: list[Any], origins: list[Origin], number: int, frame: Frame
) -> Found:
    index, *values = args
    starts = [number + search.layout.branch(eqn, i) for i in range(len(eqn.params["branches"]))]
    parts = [
        _Part(search, branch, values, origins[1:], start, frame)
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
    return _taken(parts[0], results, frame)


@_handles("shard_map")
def _shard_map(
    search: Search, eqn: Any, args: list[Any], origins: list[Origin], number: int, frame: Frame
) -> Found:
    """Every device has its own origins; outside, the earliest of them all is taken."""
    params = eqn.params
    body, mesh, typed = params["jaxpr"], params["mesh"], params["check_vma"]
    order = [a for a in mesh.axis_names if a in params["newly_manual_axes"]]
    here = frame.axes | frozenset(order)
    places = [i for i, o in enumerate(origins) if o is not None]
    out_at = [i for i, v in enumerate(_jax.open_jaxpr(body).outvars) if checked(v.aval)]

    def local(rows: Any, *flat: Any) -> list[Any]:
        inner = frame.within()
        inner.axes, inner.typed = here, (here if typed else frozenset())
        given = Handed(inner.same(rows))
        names = inner.known(given.origins)[: len(places)]
        known = [_if_bad(flat[i], o, inner) for i, o in zip(places, names, strict=True)]
        outs, found = search.body(body, flat, _spread(len(flat), places, known), 0, inner)
        device = jnp.int32(0)
        for axis in order:
            device = device * mesh.shape[axis] + lax.axis_index(axis)
        packed = inner.packed([*(found[i] for i in out_at), search.first(inner)])
        left = inner.same(given.leaving(inner, packed, number, 0, device.astype(jnp.int32)))
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
    rows = frame.same(nowhere(1, frame.width)) if rows is None else rows
    *outs, rows = mapped(rows, *args)
    rows = rows.reshape((-1, *rows.shape[len(order) :]))
    while rows.shape[0] > 1:
        if rows.shape[0] % 2:
            rows = jnp.concatenate([rows, rows[-1:]])
        rows = sooner(rows[0::2], rows[1::2])
    found = frame.results(number, rows[0])
    return list(outs), _spread(len(outs), out_at, found[:-1])
