"""The harvest of `compat.oryx`: plant values in a program, and reap its sown values."""

import contextlib
import dataclasses
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tapax._api.change_builder import ChangeBuilder
from tapax._calling.program import TracedCall
from tapax._calling.survey import Spot
from tapax._calling.transform import Transform
from tapax._jax import PyTree, Value
from tapax._jaxpr.bodies import list_equations
from tapax._jaxpr.kinds import CUSTOM_RULES, Kind, kind_of
from tapax._jaxpr.leading_axes import align, where
from tapax._marks.operations import internal_operations
from tapax._sites import SiteError
from tapax._walk.calls import Call
from tapax._walk.changes import Part
from tapax._walk.entries import Entry
from tapax._walk.plan import Plan
from tapax._walk.walk import Walk
from tapax.compat._oryx_checks import check_places, group_by_name
from tapax.compat._oryx_marks import (
    Name,
    ReapHooks,
    RulePlant,
    SowFrame,
    SownLeaf,
    SowPlace,
    SowSurveyHooks,
    as_weak,
    give_way,
    nesting,
    show,
    weak_plants,
)


@dataclasses.dataclass(frozen=True)
class OryxHarvest(Transform):
    """A transformation that plants, reaps, or does both."""

    plan: Plan
    function: str
    plants: bool
    tag: Hashable
    allowed: frozenset[str] | None
    blocked: frozenset[str]
    exclusive: bool

    def prepare(self, call: TracedCall) -> tuple[list[Spot], set[Name]]:
        """Find the sites to plant, and all sown names."""
        if not self.plants:
            return [], set()
        hooks = SowSurveyHooks()
        walk = Walk(Plan(lambda site: self._has(site.collection), None), hooks=hooks)
        jax.eval_shape(lambda *arrays: call.program.run(walk, arrays), *call.arrays)
        plants = call.operands
        tagged = {sow: at for sow, at in hooks.placed.items() if self._has(sow.mark.collection)}
        check_places(hooks, self._harvests)

        def is_planted(sown: SownLeaf) -> bool:
            found = _find(plants, sown.local_name) is not _MISSING
            return found and sown.only != "reap" and self._allows(sown)

        planted = {sow: at for sow, at in tagged.items() if is_planted(sow.mark.collection)}
        group_by_name(planted, "planted")
        spots = [spot for spot in hooks.spots.values() if is_planted(spot.site.collection)]
        for spot in spots:
            found = jax.tree.structure(_find(plants, spot.site.collection.local_name))
            expected = spot.site.collection.treedef
            if found != expected:
                raise SiteError(
                    f"The plant for {_describe(spot)} has the structure {found}, but the value has "
                    f"{expected}. Plant a value of that structure."
                )
        return spots, {sow.mark.collection.local_name for sow in tagged}

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        spots, names = prepared
        builder = ChangeBuilder(call.checked)
        for spot in spots:
            sown = spot.site.collection
            for x in jax.tree.leaves(_find(call.operands, sown.local_name))[sown.index :][:1]:
                builder.change(spot, _plant, [_make_part(spot, x)])
        planted = {spot.site.collection.local_name for spot in spots}
        in_rules = self._make_rule_plants(call)

        def picks(sown: Any) -> bool:
            if self.function == "plant" or not self._has(sown) or sown.only == "plant":
                return False
            return self._allows(sown) and sown.local_name not in planted

        def takes(sown: Any) -> bool:
            if self._has(sown):
                return self.function != "plant" or sown.local_name in planted
            return self.exclusive and isinstance(sown, SownLeaf)

        keyed = {(self.tag, (*nesting.value, *name)): plant for name, plant in in_rules.items()}
        hooks = ReapHooks(picks, takes, self.plan.marking_policy(None), keyed)
        walk = Walk(Plan(lambda site: picks(site.collection), None), builder.changes(), hooks)
        outs = call.program.run(walk, call.arrays)
        if not self.plants:
            check_places(hooks, self._harvests)
        used = {name for name, plant in in_rules.items() if plant.is_used}
        _warn_unknown(call.operands, names | used, self.tag)
        with internal_operations():
            return outs, _collect_reaps(walk, hooks)

    def _make_rule_plants(self, call: TracedCall) -> dict[Name, RulePlant]:
        """Make plants for derivative rules, without derivatives with respect to the plants."""
        equations = list_equations(call.program.jaxpr)
        if not any(kind_of(eqn) & CUSTOM_RULES for eqn in equations):
            return {}
        return {
            name: RulePlant(jax.tree.map(jax.lax.stop_gradient, value))
            for name, value in _list_plants(call.operands)
            if self._allows_name(name)
        }

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        return {"plant": out, "reap": extra}.get(self.function, (out, extra))

    def set_weak_plants(self, plants: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
        """Make a context in which values of this tag take the types of their weak plants."""
        others = [pair for pair in weak_plants.value if pair[0][0] != self.tag]
        planted = [
            ((self.tag, (*nesting.value, *name), i), dtype)
            for name, i, dtype in _list_weak(plants)
            if self._allows_name(name)
        ]
        return weak_plants((*others, *planted))

    def _harvests(self, sown: Any) -> bool:
        return self._has(sown) and self._allows(sown)

    def _has(self, sown: Any) -> bool:
        return isinstance(sown, SownLeaf) and sown.tag == self.tag

    def _allows(self, sown: SownLeaf) -> bool:
        return self._allows_name(sown.local_name)

    def _allows_name(self, name: Name) -> bool:
        inside = self.allowed is None or name[-1] in self.allowed
        return inside and self.blocked.isdisjoint(name)


_MISSING = object()


def _find(plants: PyTree, name: Name) -> Any:
    for part in name:
        if not isinstance(plants, Mapping) or part not in plants:
            return _MISSING
        plants = plants[part]
    return plants


def _list_plants(plants: Mapping[str, Any], scope: Name = ()) -> Iterator[tuple[Name, Any]]:
    """List the plants by name.

    A dict may contain the names of a scope, or be a value itself: it is listed as both.
    """
    for key, value in plants.items():
        yield (*scope, key), value
        if isinstance(value, Mapping):
            yield from _list_plants(value, (*scope, key))


def _list_weak(plants: Mapping[str, Any]) -> Iterator[tuple[Name, int, Any]]:
    """List the leaves of plants that have a weak type: name, number of the leaf, dtype."""
    for name, value in _list_plants(plants):
        for i, leaf in enumerate(jax.tree.leaves(value)):
            if getattr(jax.typeof(leaf), "weak_type", False):
                yield name, i, leaf.dtype


def _warn_unknown(plants: PyTree, names: set[Name], tag: Hashable, scope: Name = ()) -> None:
    """Warn of a plant that has no effect."""
    for key, value in plants.items():
        name = (*scope, key)
        if name in names:
            continue
        if isinstance(value, Mapping) and any(known[: len(name)] == name for known in names):
            _warn_unknown(value, names, tag, name)
            continue
        known = ", ".join(map(show, sorted(names))) or "none"
        warnings.warn(
            f"`plants` has a value for {show(name)}, which is ignored, because the function sows "
            f"no such name with the tag {tag!r}. It sows {known}.",
            stacklevel=2,
        )


def _make_part(spot: Spot, array: Value) -> Part:
    """Make the part of a change that plants an array, with an entry per iteration if appended."""
    marked, each = spot.own, spot.site.collection.mode == "append"
    dtype = jnp.result_type(marked.dtype, array) if array.weak_type else array.dtype
    if dtype != marked.dtype:
        raise SiteError(
            f"The plant for {_describe(spot)} is of type {dtype}, but the value is {marked.dtype}. "
            "Cast the plant."
        )
    depths = tuple(d for d in spot.depths if each or not spot.around[d].is_loop)
    loops = tuple(spot.around[d].size for d in depths)
    if array.shape == (*loops, *spot.mapped, *marked.shape):
        return Part(array, depths, len(spot.mapped))
    if array.shape == (*loops, *marked.shape):
        return Part(array, depths)
    raise SiteError(
        f"The plant for {_describe(spot)} has shape {list(array.shape)}, but the value has shape "
        f"{[*loops, *spot.mapped, *marked.shape]}. Plant an array of that shape."
    )


def _plant(x: Value, counter: Value, plant: Any) -> Any:
    del counter
    if plant.dtype == x.dtype:
        return plant
    is_weak = getattr(jax.typeof(x), "weak_type", False)
    return as_weak(plant, x.dtype) if is_weak else plant.astype(x.dtype)


def _describe(spot: Spot) -> str:
    return f"{show(spot.site.collection.name)}, sown at {spot.site.source},"


class _ReapedValue(NamedTuple):
    """A reaped value of one sow; `single` is true before it has an axis of appended values."""

    frames: tuple[SowFrame, ...]
    value: Any
    valid: Any
    meshes: int
    single: bool = True


def _collect_reaps(walk: Walk, hooks: ReapHooks) -> dict[str, Any]:
    picked = {c: at for c, at in hooks.placed.items() if hooks.picks(c.mark.collection)}
    entries: dict[Any, list[Entry]] = {}
    for entry in (*walk.entries, *walk.fold_entries()):
        sown = entry.site.collection
        entries.setdefault((sown.local_name, sown.index), []).append(entry)
    reaps: dict[str, Any] = {}
    for name, calls in group_by_name(picked, "reaped").items():
        treedef = calls[0].mark.collection.treedef
        inner = reaps
        for scope in name[:-1]:
            inner = inner.setdefault(scope, {})
        leaves = []
        for i in range(treedef.num_leaves):
            leaf = _join_entries(name, entries[name, i], picked)
            is_weak = all(picked[c].is_weak for c in calls if c.mark.collection.index == i)
            leaves.append(as_weak(leaf, leaf.dtype) if is_weak else leaf)
        inner[name[-1]] = treedef.unflatten(leaves)
    return reaps


def _join_entries(name: Name, entries: Sequence[Entry], placed: Mapping[Call, SowPlace]) -> Any:
    """Join the entries of one name to its reaped value."""
    first, *others = entries
    if first.folded:
        if others:
            raise SiteError(
                f"{show(name)}, sown at {first.site.source}, is clobbered inside a shard_map, in "
                "which every device has a value, and elsewhere. Rename one of them."
            )
        return first.value
    items = []
    strong = {placed[entry.call].dtype for entry in entries if not placed[entry.call].is_weak}
    for entry in entries:
        frames = placed[entry.call].frames
        meshes = len(entry.loops) - sum(frame.kind is Kind.SCAN for frame in frames)
        value = entry.value
        if placed[entry.call].is_weak and len(strong) == 1:
            value = give_way(value, *strong)
        items.append(_ReapedValue(frames, value, entry.valid, meshes))
    try:
        return _join(items, 0).value
    except _TypeMismatch as mismatch:
        raise SiteError(
            f"{show(name)}, sown at {first.site.source} and at {others[-1].site.source}, has "
            f"values of different types: {mismatch}. Rename one of them."
        ) from None


class _TypeMismatch(Exception):
    pass


def _join(items: Sequence[_ReapedValue], axis: int) -> _ReapedValue:
    """Join several values, along an axis if they do not exclude each other."""
    groups: dict[Any, list[_ReapedValue]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.frames[0][:2] if item.frames else number, []).append(item)
    parts = [_join_group(group, axis) for group in groups.values()]
    if len(parts) == 1:
        return parts[0]
    values = [jnp.expand_dims(p.value, axis) if p.single else p.value for p in parts]
    _check_same((v.dtype, v.shape[:axis] + v.shape[axis + 1 :]) for v in values)
    valid = None
    if any(part.valid is not None for part in parts):
        masks = [_make_mask(part, part.value.shape) for part in parts]
        valid = jnp.concatenate(
            [m.reshape(v.shape) for m, v in zip(masks, values, strict=True)], axis
        )
    return _ReapedValue((), jnp.concatenate(values, axis), valid, 0, single=False)


def _join_group(group: Sequence[_ReapedValue], axis: int) -> _ReapedValue:
    """Join the values in one loop, mesh or conditional."""
    if not group[0].frames:
        return group[0]
    kind, key, _ = group[0].frames[0]
    branches: dict[Any, list[_ReapedValue]] = {}
    for item in group:
        inside = item._replace(frames=item.frames[1:])
        branches.setdefault(item.frames[0].branch, []).append(inside)
    if kind is Kind.SCAN:
        return _join(branches[0], axis + 1)._replace(single=False)
    if kind is Kind.SHARD_MAP:
        _check_same(f"{item.meshes} axes of a mesh" for item in group)
        inner = [item._replace(meshes=0) for item in branches[0]]
        return _join(inner, axis + group[0].meshes)._replace(single=True)
    parts = [_join(branch, axis) for branch in branches.values()]
    _check_same((part.value.dtype, part.value.shape) for part in parts)
    merged = parts[0]
    for part in parts[1:]:
        shape = max(merged.valid.shape, part.valid.shape, key=len)
        ran, runs = _make_mask(merged, shape), _make_mask(part, shape)
        value = where(runs, part.value, merged.value)
        if key == "vmap" and jnp.issubdtype(value.dtype, jnp.inexact):
            # The branches may belong to two conditionals; if both ran, the name was sown twice.
            value = where(ran & runs, jnp.full_like(value, jnp.nan), value)
        merged = merged._replace(value=value, valid=ran | runs)
    return merged


def _make_mask(item: _ReapedValue, shape: tuple[int, ...]) -> Any:
    """Make the mask of an item, with all the axes of a shape."""
    if item.valid is None:
        return jnp.ones(shape, bool)
    return jnp.broadcast_to(align(item.valid, len(shape)), shape)


def _check_same(types: Iterable[Any]) -> None:
    """Raise unless all types are equal."""
    shown = (t if isinstance(t, str) else f"{t[0]}{list(t[1])}" for t in types)
    first, *others = dict.fromkeys(shown)
    if others:
        raise _TypeMismatch(f"{first} and {others[0]}")
