"""Handlers that carry origins through loops, branches, remat and shard_map: see `_origins`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

import tapax.nonfinite._evaluation as evaluation
import tapax.nonfinite._frames as frames
from tapax import _jax
from tapax._walk.entries import where
from tapax.nonfinite._equation_numbers import REMATS, is_inexact
from tapax.nonfinite._evaluation import Scan, While
from tapax.nonfinite._frames import NONE, Origin, OriginFrame, Origins, badness
from tapax.nonfinite._origins import EquationCall, Handler, OriginWalk, ValuesAndOrigins


def _scatter(count: int, places: Sequence[int], origins: Sequence[Origin]) -> Origins:
    """A list of `count` origins: those given at their places, None elsewhere."""
    out: Origins = [None] * count
    for i, origin in zip(places, origins, strict=True):
        out[i] = origin
    return out


def _outer_rows(frame: OriginFrame, origins: Sequence[Origin]) -> Any:
    """The rows, in a loop, of what comes from around it: what is in a table has its number."""
    if not origins:
        return None
    return jnp.pad(frame.pack(origins)[:, None], ((0, 0), (0, frame.width - 1)))


def _some_rows(frame: OriginFrame, groups: Sequence[Any]) -> Any:
    """All rows together, at least one: some compilers fail on empty arrays."""
    some = [rows for rows in groups if rows is not None]
    return jnp.concatenate(some) if some else frame.vary(frames.finite_rows(1, frame.width))


def _part_origin(x: Any, origin: Origin, frame: OriginFrame) -> Origin:
    """The origin of a part of a value, which may well be finite."""
    return frame.add([origin], badness(x), NONE)


class _LoopBody:
    """The body of a loop, with origins: the loop carries a row for each value of its state.

    It carries too, as `best`, the earliest rows of its other results and of what is bad in it.
    """

    def __init__(self, walk: OriginWalk, step: EquationCall, loop: Scan | While):
        self._walk, self._number, self._frame, self.loop = walk, step.number, step.frame, loop
        origins = step.origins[loop.first :]
        nconsts, nstate = len(loop.consts), len(loop.init)
        known = [i for i, origin in enumerate(origins) if origin is not None]
        consts = [i for i in known if i < nconsts]
        self._state = [nconsts + i for i, x in enumerate(loop.init) if is_inexact(jax.typeof(x))]
        self._xs = [i for i in known if i >= nconsts + nstate]
        self._places = [*consts, *self._state, *self._xs]
        self._const_rows, rows, self._x_rows = (
            _outer_rows(self._frame, [origins[i] for i in places])
            for places in (consts, self._state, self._xs)
        )
        self._outvars = _jax.open_jaxpr(loop.body).outvars
        self._outs = [i for i, v in enumerate(self._outvars) if is_inexact(v.aval)]
        others = 1 + len(self._outs) - len(self._state)
        best = self._frame.vary(frames.finite_rows(others, self._frame.width))
        self.carry = (loop.init, rows, best, jnp.int32(0))

    def run(self, carry: Any, xs: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        """Run an iteration; return what the loop carries, and the other results."""
        state, rows, best, count = carry
        frame, inner = self._frame, self._frame.inner(loop=True)
        given = frames.FrameInputs(_some_rows(frame, [self._const_rows, rows, self._x_rows]))
        operands = [*self.loop.consts, *state, *xs]
        known = inner.add_known(given.origins)[: len(self._places)]
        before = _scatter(len(operands), self._places, known)
        for i in self._xs:
            before[i] = _part_origin(operands[i], before[i], inner)
        outs, found = self._walk.run_body(self.loop.body, operands, before, 0, inner)
        if isinstance(self.loop, While) and self.loop.mapped:
            go = self.loop.goes_on(state)
            for i, x in enumerate(state):
                if found[i] is not None:
                    now = where(go, jnp.asarray(outs[i]), jnp.zeros_like(outs[i]))
                    old = where(~go, x, jnp.zeros_like(x))
                    origin = before[len(self.loop.consts) + i]
                    parts = _part_origin(now, found[i], inner), _part_origin(old, origin, inner)
                    found[i] = inner.add(parts, None, NONE)
            outs = self.loop.keep_done(outs, state)
        wanted = [*(found[i] for i in self._outs), self._walk.first_bad(inner)]
        left = given.rows_outside(inner, inner.pack(wanted), self._number, count)
        carried = len(self._state)
        rows = frame.vary(left[:carried]) if carried else None
        best = frame.vary(frames.earlier_rows(best, left[carried:]))
        new = [jnp.asarray(x) for x in outs[: len(state)]]
        return (new, rows, best, count + 1), outs[len(state) :]

    def origins(self, carry: Any) -> Origins:
        """The origins of the results of the loop."""
        _, rows, best, _ = carry
        rows = best if rows is None else jnp.concatenate([rows, best])
        found = self._frame.add_results(self._number, rows)
        return _scatter(len(self._outvars), self._outs, found[:-1])


def _follow_scan(walk: OriginWalk, step: EquationCall) -> ValuesAndOrigins:
    loop = Scan(step.eqn, step.args)
    body = _LoopBody(walk, step, loop)
    carry, ys = loop.run(body.run, body.carry)
    return [*carry[0], *ys], body.origins(carry)


def _follow_while(walk: OriginWalk, step: EquationCall) -> ValuesAndOrigins:
    loop = While(step.eqn, step.args)
    body = _LoopBody(walk, step, loop)
    carry = lax.while_loop(
        lambda carry: loop.any_goes_on(carry[0]), lambda carry: body.run(carry)[0], body.carry
    )
    return list(carry[0]), body.origins(carry)


class _StagedBody:
    """A jaxpr of a body inside a frame; it returns results, their origins, and the tables."""

    def __init__(
        self, walk: OriginWalk, jaxpr: Any, args: Any, origins: Any, base: int, frame: OriginFrame
    ):
        self.places = [i for i, o in enumerate(origins) if o is not None]
        cell: dict[str, Any] = {}

        def body(packed: Any, *args: Any) -> list[Any]:
            inner = frame.inner(loop=False)
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


def _add_results(
    parts: Sequence[_StagedBody], results: Sequence[Any], frame: OriginFrame
) -> ValuesAndOrigins:
    """Split what staged bodies returned into results and origins; add their tables to a frame."""
    own = parts[0].own
    frame.slots += [slot for part in parts for slot in part.slots]
    frame.tables += results[len(own) + 1 :]
    found = frame.add_known(results[len(own)])[: len(own)]
    origins = [o if is_inexact(v.aval) else None for o, v in zip(found, own, strict=True)]
    return list(results[: len(own)]), origins


def _follow_remat(walk: OriginWalk, step: EquationCall) -> ValuesAndOrigins:
    eqn, args, origins, number, frame = step
    part = _StagedBody(walk, eqn.params["jaxpr"], args, origins, number + 1, frame)
    results = evaluation.bind_remat(eqn, part.jaxpr, part.operands)
    return _add_results([part], results, frame)


def _follow_cond(walk: OriginWalk, step: EquationCall) -> ValuesAndOrigins:
    eqn, (index, *values), origins, number, frame = step
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
    return _add_results(parts, results, frame)


def _follow_shard_map(walk: OriginWalk, step: EquationCall) -> ValuesAndOrigins:
    """Track origins on each device; outside, the earliest of all devices counts."""
    eqn, args, origins, number, frame = step
    body, mesh, order = eqn.params["jaxpr"], eqn.params["mesh"], evaluation.mesh_axes(eqn)
    here = frame.axes | frozenset(order)
    places = [i for i, o in enumerate(origins) if o is not None]
    out_at = [i for i, v in enumerate(_jax.open_jaxpr(body).outvars) if is_inexact(v.aval)]

    def local(rows: Any, *flat: Any) -> list[Any]:
        inner = frame.inner(loop=True)
        inner.axes, inner.typed = here, (here if eqn.params["check_vma"] else frozenset())
        given = frames.FrameInputs(inner.vary(rows))
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
        in_specs=(PartitionSpec(), *eqn.params["in_specs"]),
        out_specs=[*eqn.params["out_specs"], PartitionSpec(*order)],
        **evaluation.shard_map_options(eqn),
    )
    *outs, rows = mapped(
        _some_rows(frame, [_outer_rows(frame, [origins[i] for i in places])]), *args
    )
    rows = rows.reshape((-1, *rows.shape[len(order) :]))
    while rows.shape[0] > 1:
        if rows.shape[0] % 2:
            rows = jnp.concatenate([rows, rows[-1:]])
        rows = frames.earlier_rows(rows[0::2], rows[1::2])
    found = frame.add_results(number, rows[0])
    return outs, _scatter(len(outs), out_at, found[:-1])


HANDLERS: dict[str, Handler] = {
    "scan": _follow_scan,
    "while": _follow_while,
    "cond": _follow_cond,
    "shard_map": _follow_shard_map,
    **dict.fromkeys(REMATS, _follow_remat),
}
"""A handler for every kind of equation whose body is staged again."""
