"""The handler of `jax.shard_map`, which adds mesh axes to the entries of its body."""

from typing import Any

from jax.sharding import Mesh, PartitionSpec

from tapax import _jax
from tapax._jax import Equation, Value
from tapax._jaxpr.kinds import Kind
from tapax._jaxpr.meshes import replicate
from tapax._jaxpr.restage import bind_shard_map, mesh_axes
from tapax._walk.changes import Around
from tapax._walk.entries import Entry, Slots
from tapax._walk.interpreter import Interpreter
from tapax._walk.reductions import along_one_axis


def walk_shard_map(walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
    """Stack the entries of all devices along leading axes, one per mesh axis they vary over."""
    params = eqn.params
    body, mesh = params["jaxpr"], params["mesh"]
    order = mesh_axes(eqn)
    ins = Slots.of(args)
    keys = walk.changes.needed([body])
    depth, unchecked = len(walk.around), not params["check_vma"]
    # The mesh axes for which each part of a change has an axis.
    deep = [walk.changes.parts[key].depths for key in keys]
    part_axes = [[a for i, a in enumerate(order) if depth + i in depths] for depths in deep]

    def local(*flat: Value) -> tuple[list[Value], list[Value], Any]:
        axes = [Around(Kind.SHARD_MAP, a, mesh.shape[a], unchecked) for a in order]
        with walk.inside(around=axes):
            walk.folds.items, walk.mesh = {}, mesh
            given = flat[len(flat) - len(keys) :]
            parts = [x.reshape(x.shape[len(a) :]) for x, a in zip(given, part_axes, strict=True)]
            walk.changes.set_arrays(keys, parts, below=depth + len(order))
            outs = walk.run(body, ins.fill(iter(flat)))
            found = [*walk.entries, *walk.fold_entries()]
            entries = [e if e.reduction is None else e.even for e in found]
            slots = Slots.of(outs)
            static = slots, tuple(e.bare for e in entries)
            return slots.padded(outs), [a for e in entries for a in e.arrays], static

    in_specs = [
        *(params["in_specs"][i] for i in ins.kept),
        *(PartitionSpec(*axes) for axes in part_axes),
    ]
    parts = zip(walk.changes.arrays(keys), part_axes, strict=True)
    given, other = [_jax.with_spec(x, a) for x, a in parts], _other_mesh(walk, mesh)
    if other is not None:
        given = replicate(given, other)
    left = bind_shard_map(eqn, local, [*ins.arrays(args), *given], in_specs)
    outs, entries = left.static
    extra = left.extra if other is None else replicate(left.extra, other)
    flat, axes = iter(extra), iter(left.axes)
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
    return outs.fill(iter(left.results))


def _other_mesh(walk: Interpreter, mesh: Any) -> Mesh | None:
    """Return the mesh in which JAX expresses the shardings of the results, unless it is `mesh`."""
    inside = any(a.kind is Kind.SHARD_MAP for a in walk.around)
    first = None if inside or not isinstance(mesh, Mesh) else walk.first_mesh
    return None if first == mesh else first


def _combined(entry: Entry, axes: int) -> Entry:
    """Merge the states of all devices, which are along the first `axes` axes of the entry."""
    if not axes:
        return entry
    assert entry.reduction is not None
    state, valid = along_one_axis(entry.state, axes), entry.valid
    if valid is not None:
        (valid,) = along_one_axis([valid], axes)
        state, valid = entry.reduction.masked(state, valid), valid.max(0)
    return entry._replace(value=tuple(entry.reduction.merge(state, entry.lead)), valid=valid)
