"""Handlers that carry origins through loops, branches, remat and shard_map: see `_origins`."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import tapax.nonfinite._frames as frames
from tapax import _jax
from tapax._jax import Jaxpr, PyTree, Static, Value
from tapax._jaxpr.kinds import Kind
from tapax._jaxpr.leading_axes import where
from tapax._jaxpr.restage import (
    Branch,
    Scan,
    While,
    bind_cond,
    bind_remat,
    bind_shard_map,
    mesh_axes,
)
from tapax._marks.marked_jaxprs import strip
from tapax.nonfinite._equation_numbers import has_origin, is_inexact
from tapax.nonfinite._frames import NONE, Origin, OriginFrame, Origins
from tapax.nonfinite._origins import EquationCall, Handler, OriginWalk, ValuesAndOrigins


def _scatter(count: int, places: Sequence[int], origins: Sequence[Origin]) -> Origins:
    """Make a list of `count` origins, with `origins` at `places` and None elsewhere."""
    out: Origins = [None] * count
    for i, origin in zip(places, origins, strict=True):
        out[i] = origin
    return out


def _outer_rows(frame: OriginFrame, origins: Sequence[Origin]) -> Any:
    """Make the rows, in a loop, of origins outside it; a row in a table is given by its number."""
    if not origins:
        return None
    return jnp.pad(frame.pack(origins)[:, None], ((0, 0), (0, frame.width - 1)))


def _some_rows(frame: OriginFrame, groups: Sequence[Any]) -> Any:
    """Concatenate rows; return at least one row, since some compilers fail on empty arrays."""
    some = [rows for rows in groups if rows is not None]
    return jnp.concatenate(some) if some else frame.vary(frames.finite_rows(1, frame.width))


def _part_origin(x: Value, origin: Origin, frame: OriginFrame) -> Origin:
    """Return the origin of `x`, a part of a value with `origin`: the part may be finite."""
    return frame.add_value([origin], x, NONE) if is_inexact(jax.typeof(x)) else origin


def _body_operands(loop: Scan | While) -> list[Value]:
    """Return the operands of a loop that its body takes."""
    return [*loop.consts, *loop.init, *(loop.xs if isinstance(loop, Scan) else ())]


class _LoopBody:
    """The body of a loop, with origins: the loop carries a row for each value of its state.

    The loop also carries, as `best`, the earliest row of each of its other results, and of the
    first bad value in the body.
    """

    def __init__(self, walk: OriginWalk, step: EquationCall, loop: Scan | While):
        self._walk, self._number, self._frame, self.loop = walk, step.number, step.frame, loop
        origins = step.origins[len(step.args) - len(_body_operands(loop)) :]
        nconsts, nstate = len(loop.consts), len(loop.init)
        known = [i for i, origin in enumerate(origins) if origin is not None]
        consts = [i for i in known if i < nconsts]
        self._state = [nconsts + i for i, x in enumerate(loop.init) if has_origin(jax.typeof(x))]
        self._xs = [i for i in known if i >= nconsts + nstate]
        self._places = [*consts, *self._state, *self._xs]
        self._constant = self._frame.constants_among([origins[i] for i in self._places])
        self._const_rows, rows, self._x_rows = (
            _outer_rows(self._frame, [origins[i] for i in places])
            for places in (consts, self._state, self._xs)
        )
        self._outvars = _jax.open_jaxpr(loop.body).outvars
        self._outs = [i for i, v in enumerate(self._outvars) if has_origin(v.aval)]
        others = 1 + len(self._outs) - len(self._state)
        best = self._frame.vary(frames.finite_rows(others, self._frame.width))
        self.carry = (list(map(jnp.asarray, loop.init)), rows, best, jnp.int32(0))

    def run(self, carry: PyTree, xs: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        """Run an iteration; return the carry of the loop, and the other results."""
        state, rows, best, count = carry
        frame, inner = self._frame, self._frame.inner(loop=True)
        given = frames.FrameInputs(_some_rows(frame, [self._const_rows, rows, self._x_rows]))
        operands = [*self.loop.consts, *state, *xs]
        known = inner.add_known(given.origins, self._constant)[: len(self._places)]
        before = _scatter(len(operands), self._places, known)
        for i in self._xs:
            before[i] = _part_origin(operands[i], before[i], inner)
        outs, found = self._walk.run_body(self.loop.body, operands, before, 0, inner)
        if isinstance(self.loop, While) and self.loop.is_mapped:
            go = self.loop.goes_on(state)
            for i, x in enumerate(state):
                origin = before[len(self.loop.consts) + i]
                if not is_inexact(jax.typeof(x)):
                    found[i] = inner.add_discrete([found[i], origin])
                elif found[i] is not None:
                    now = where(go, jnp.asarray(outs[i]), jnp.zeros_like(outs[i]))
                    old = where(~go, x, jnp.zeros_like(x))
                    parts = _part_origin(now, found[i], inner), _part_origin(old, origin, inner)
                    found[i] = inner.add(parts, None, NONE)
            outs = self.loop.keep_finished(outs, state)
        wanted = [*(found[i] for i in self._outs), self._walk.first_bad(inner)]
        left = given.rows_outside(inner, inner.pack(wanted), self._number, count)
        carried = len(self._state)
        rows = frame.vary(left[:carried]) if carried else None
        best = frame.vary(frames.earlier_rows(best, left[carried:]))
        new = [jnp.asarray(x) for x in outs[: len(state)]]
        return (new, rows, best, count + 1), outs[len(state) :]

    def origins(self, carry: PyTree) -> Origins:
        """Return the origins of the results of the loop."""
        _, rows, best, _ = carry
        rows = best if rows is None else jnp.concatenate([rows, best])
        found = self._frame.add_results(self._number, rows)
        return _scatter(len(self._outvars), self._outs, found[:-1])


def _follow_scan(walk: OriginWalk, step: EquationCall) -> ValuesAndOrigins:
    loop = Scan.of(step.eqn, step.args)
    body = _LoopBody(walk, step, loop)
    carry, ys = loop.run(body.run, body.carry)
    return [*carry[0], *ys], body.origins(carry)


def _follow_while(walk: OriginWalk, step: EquationCall) -> ValuesAndOrigins:
    loop = While.of(step.eqn, step.args, strip(step.eqn.params["cond_jaxpr"]))
    body = _LoopBody(walk, step, loop)
    carry = lax.while_loop(
        lambda carry: loop.any_goes_on(carry[0]), lambda carry: body.run(carry)[0], body.carry
    )
    return list(carry[0]), body.origins(carry)


class _TrackedBody:
    """A jaxpr of a body inside a frame that returns results, their origins, and the tables."""

    def __init__(self, walk: OriginWalk, jaxpr: Jaxpr, step: EquationCall, base: int):
        """Trace the body on the operands of `step`; the equation numbers start at `base`."""
        frame, origins = step.frame, step.origins
        self.places = [i for i, o in enumerate(origins) if o is not None]
        constant = frame.constants_among([origins[i] for i in self.places])

        def body(packed: Value, *args: Value) -> Any:
            inner = frame.inner(loop=False)
            known = inner.add_known(packed, constant)[: len(self.places)]
            before = _scatter(len(args), self.places, known)
            outs, found = walk.run_body(jaxpr, args, before, base, inner)
            results = [
                *map(jnp.asarray, outs),
                frame.vary(inner.pack([*found, walk.first_bad(inner)])),
                *map(frame.vary, inner.tables),
            ]
            return results, Static((inner.slots, [o is not None for o in found]))

        self.operands = [frame.pack([origins[i] for i in self.places] or [None]), *step.args]
        self.jaxpr, (_, static) = jax.make_jaxpr(body, return_shape=True)(*self.operands)
        self.slots: list[int]
        self.have_origins: list[bool]
        self.slots, self.have_origins = static.value
        self.own = _jax.open_jaxpr(jaxpr).outvars


def _add_results(
    parts: Sequence[_TrackedBody], results: Sequence[Value], frame: OriginFrame
) -> ValuesAndOrigins:
    """Split the results of tracked bodies into values and origins; add their tables to `frame`."""
    own = parts[0].own
    frame.slots += [slot for part in parts for slot in part.slots]
    frame.tables += results[len(own) + 1 :]
    found = frame.add_known(results[len(own)])[: len(own)]
    have_origins = map(any, zip(*(part.have_origins for part in parts), strict=True))
    origins = [o if has else None for o, has in zip(found, have_origins, strict=True)]
    return list(results[: len(own)]), origins


def _follow_remat(walk: OriginWalk, step: EquationCall) -> ValuesAndOrigins:
    part = _TrackedBody(walk, _jax.call_body(step.eqn), step, step.number + 1)
    sources = [None, *range(len(step.args))]
    results = bind_remat(step.eqn, part.jaxpr, part.operands, sources)
    return _add_results([part], results, step.frame)


def _follow_cond(walk: OriginWalk, step: EquationCall) -> ValuesAndOrigins:
    eqn, inside = step.eqn, step._replace(args=step.args[1:], origins=step.origins[1:])
    starts = zip(eqn.params["branches"], walk.equations.body_starts(eqn, step.number), strict=True)
    parts = [_TrackedBody(walk, branch, inside, start) for branch, start in starts]
    common = len(parts[0].own) + 1

    def branch_of(part: _TrackedBody) -> Branch:
        def branch(*flat: Value) -> tuple[list[Value], list[Value]]:
            results = _jax.as_function(part.jaxpr)(*flat)
            return results[:common], results[common:]

        return branch

    tables = [[v.aval for v in _jax.open_jaxpr(p.jaxpr).outvars[common:]] for p in parts]
    shared, found = bind_cond(
        eqn, step.args[0], parts[0].operands, [branch_of(p) for p in parts], tables
    )
    outs, origins = _add_results(parts, [*shared, *itertools.chain(*found)], step.frame)
    decider = step.origins[0]
    return outs, [_decided(x, o, decider, step.frame) for x, o in zip(outs, origins, strict=True)]


def _decided(x: Value, origin: Origin, decider: Origin, frame: OriginFrame) -> Origin:
    """Return the origin of `x`, the result of a branch that a value of origin `decider` chose."""
    if decider is None or not has_origin(jax.typeof(x)):
        return origin
    if not is_inexact(jax.typeof(x)):
        return frame.add_discrete([origin, decider])
    return None if origin is None else frame.add_value([origin, decider], x, NONE)


def _follow_shard_map(walk: OriginWalk, step: EquationCall) -> ValuesAndOrigins:
    """Track origins on each device; outside the shard_map, keep the earliest of all devices."""
    eqn, args, origins, number, frame = step
    body, mesh, order = eqn.params["jaxpr"], eqn.params["mesh"], mesh_axes(eqn)
    here = frame.axes | frozenset(order)
    places = [i for i, o in enumerate(origins) if o is not None]
    constant = frame.constants_among([origins[i] for i in places])
    out_at = [i for i, v in enumerate(_jax.open_jaxpr(body).outvars) if has_origin(v.aval)]

    def local(rows: Value, *flat: Value) -> tuple[list[Value], list[Value], None]:
        inner = frame.inner(loop=True)
        inner.axes, inner.typed = here, (here if eqn.params["check_vma"] else frozenset())
        given = frames.FrameInputs(inner.vary(rows))
        names = inner.add_known(given.origins, constant)[: len(places)]
        known = [_part_origin(flat[i], o, inner) for i, o in zip(places, names, strict=True)]
        outs, found = walk.run_body(body, flat, _scatter(len(flat), places, known), 0, inner)
        device = jnp.int32(0)
        for axis in order:
            device = device * mesh.shape[axis] + lax.axis_index(axis)
        packed = inner.pack([*(found[i] for i in out_at), walk.first_bad(inner)])
        left = given.rows_outside(inner, packed, number, 0, device.astype(jnp.int32))
        return outs, [inner.vary(left)], None

    operands = [_some_rows(frame, [_outer_rows(frame, [origins[i] for i in places])]), *args]
    in_specs = [PartitionSpec(), *eqn.params["in_specs"]]
    outs, (rows,), _, _ = bind_shard_map(eqn, local, operands, in_specs)
    rows = _jax.whole(rows).reshape((-1, *rows.shape[len(order) :]))
    while rows.shape[0] > 1:
        if rows.shape[0] % 2:
            rows = jnp.concatenate([rows, rows[-1:]])
        rows = frames.earlier_rows(rows[0::2], rows[1::2])
    found = frame.add_results(number, rows[0])
    return outs, _scatter(len(outs), out_at, found[:-1])


HANDLERS: dict[Kind, Handler] = {
    Kind.SCAN: _follow_scan,
    Kind.WHILE: _follow_while,
    Kind.COND: _follow_cond,
    Kind.SHARD_MAP: _follow_shard_map,
    Kind.REMAT: _follow_remat,
}
"""The handler of each kind of equation that must be restaged."""
