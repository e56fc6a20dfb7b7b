"""The handler of `jax.shard_map`: what a device records gets an axis of the mesh."""

from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from tapax import _jax
from tapax._walk.changes import Around
from tapax._walk.entries import Entry, Slots
from tapax._walk.interpreter import Interpreter


def walk_shard_map(walk: Interpreter, eqn: Any, args: list[Any]) -> list[Any]:
    """Each device's part comes along a new leading axis for each mesh axis that it varies over."""
    params = eqn.params
    body, mesh = params["jaxpr"], params["mesh"]
    order = [a for a in mesh.axis_names if a in params["newly_manual_axes"]]
    ins = Slots.of(args)
    keys = walk.changes.needed([body])
    depth, unchecked = len(walk.around), not params["check_vma"]
    # The axes of the mesh for which each part of a change has an axis of its own.
    deep = [walk.changes.parts[key].depths for key in keys]
    own_axes = [[a for i, a in enumerate(order) if depth + i in depths] for depths in deep]
    cell: dict[str, Any] = {}

    def local(*flat: Any) -> list[Any]:
        with walk.inside(around=[Around(a, mesh.shape[a], unchecked) for a in order]):
            walk.folds.items, walk.mesh = {}, mesh
            given = flat[len(flat) - len(keys) :]
            parts = [x.reshape(x.shape[len(a) :]) for x, a in zip(given, own_axes, strict=True)]
            walk.changes.hand_down(keys, parts, below=depth + len(order))
            outs = walk.run(body, ins.fill(iter(flat)))
            found = [*walk.entries, *walk.fold_entries()]
            entries = [e if e.reduction is None else e.even for e in found]
            cell.update(outs=Slots.of(outs), entries=tuple(e.bare for e in entries))
            return [*cell["outs"].arrays(outs), *(a for e in entries for a in e.arrays)]

    def trace(*flat: Any) -> tuple[()]:
        cell["jaxpr"] = jax.make_jaxpr(local)(*flat)
        return ()

    # What leaves the body, and over which axes it varies, is known once the body was walked; and
    # that can be done only where its axes have a meaning.
    options: dict[str, Any] = {
        "mesh": mesh,
        "in_specs": (
            *(params["in_specs"][i] for i in ins.kept),
            *(PartitionSpec(*axes) for axes in own_axes),
        ),
        "axis_names": frozenset(order),
        "check_vma": params["check_vma"],
    }
    operands = [*ins.arrays(args), *walk.changes.arrays(keys)]
    jax.eval_shape(jax.shard_map(trace, out_specs=(), **options), *operands)
    outs, entries = cell["outs"], cell["entries"]
    own = len(outs.kept)
    avals = [v.aval for v in _jax.open_jaxpr(cell["jaxpr"]).outvars[own:]]

    def axes_of(aval: Any) -> tuple[str, ...]:
        varying = _jax.varying_axes(aval) if params["check_vma"] else frozenset(order)
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
        entry = entry.with_arrays(flat)
        if entry.reduction is not None and entry.reduction.reducer.over_maps:
            walk.entries.append(_combined(entry, len(first)))
            continue
        walk.entries.append(
            entry._replace(
                lead=entry.lead + len(first),
                loops=(*(f"{a}[{mesh.shape[a]}]" for a in first), *entry.loops),
            )
        )
    return results


def _combined(entry: Entry, axes: int) -> Entry:
    """The entry of all devices, whose states lie along the first few axes."""
    if not axes:
        return entry
    assert entry.reduction is not None
    state = [x.reshape(-1, *x.shape[axes:]) for x in entry.state]
    valid = entry.valid
    if valid is not None:
        valid = valid.reshape(-1, *valid.shape[axes:])
        state, valid = entry.reduction.masked(state, valid), valid.max(0)
    return entry._replace(value=tuple(entry.reduction.merge(state, entry.lead)), valid=valid)
