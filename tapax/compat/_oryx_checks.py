"""Checks of the `sow`s of a program: names, modes, and the branches of conditionals.

Each message starts like the error that oryx raises for the same program.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from tapax._jaxpr.kinds import Kind
from tapax._sites import SiteError
from tapax._walk.calls import Call
from tapax.compat._oryx_marks import Name, SowFrame, SowHooks, SownLeaf, SowPlace, show

_Branch: TypeAlias = dict[tuple[Name, int], tuple[Call, SowPlace]]
"""The leaves that a branch sows, by name and number."""


def check_places(hooks: SowHooks, is_harvested: Callable[[SownLeaf], bool]) -> None:
    """Raise for a name whose mode does not allow the loop around it, and for unequal branches."""
    branches: dict[Any, list[_Branch]] = {}
    for call, place in hooks.placed.items():
        sown = call.mark.collection
        # The reaped half of `sow_cond` is in a conditional that the user did not write.
        if not is_harvested(sown) or sown.only == "reap":
            continue
        _check_loops(call, place)
        for frame in place.frames:
            count = hooks.branch_counts.get(frame.key)
            if frame.kind is Kind.COND and count is not None:
                found = branches.setdefault(frame.key, [{} for _ in range(count)])
                found[frame.branch][sown.local_name, sown.index] = call, place
    for found in branches.values():
        _check_branches(found)


def _check_loops(call: Call, place: SowPlace) -> None:
    sown, kinds = call.mark.collection, {frame.kind for frame in place.frames}
    name, source = show(sown.local_name), call.mark.source
    if "clobber" in sown.mode:
        return
    if Kind.WHILE in kinds:
        raise SiteError(
            f"Must use clobber or cond_clobber mode for {name} inside of a `while_loop`. It is "
            f"sown at {source} in mode {sown.mode!r}."
        )
    if Kind.SCAN in kinds and sown.mode == "strict":
        raise SiteError(
            f"Cannot use strict mode for {name} inside `scan`. It is sown at {source}: use mode "
            "'clobber' to keep the last value, or 'append' to keep all."
        )


def _check_branches(branches: Sequence[_Branch]) -> None:
    fix = "Sow the same names in all branches, or use tapax.capture, which returns a mask for each."
    first, *others = branches
    names = dict.fromkeys(name for name, _ in first)
    for other in others:
        sown = dict.fromkeys(name for name, _ in other)
        if len(sown) != len(names):
            raise SiteError(
                "Mismatching number of `sow`s between branches. One branch of a conditional sows "
                f"{_list_names(names)}, another {_list_names(sown)}. {fix}"
            )
        for (name, index), (call, place) in other.items():
            if name not in names:
                raise SiteError(
                    f"Missing sow in branch: {show(name)}. It is sown at {call.mark.source}, but "
                    f"another branch of the conditional sows {_list_names(names)}. {fix}"
                )
            known, known_place = first.get((name, index), (call, place))
            for what in ("shape", "dtype"):
                here, there = getattr(place, what), getattr(known_place, what)
                if here != there:
                    raise SiteError(
                        f"Mismatched {what} between branches: {show(name)}. The {what} is {here} "
                        f"at {call.mark.source}, and {there} at {known.mark.source}."
                    )


def _list_names(names: Iterable[Name]) -> str:
    return ", ".join(map(show, names)) or "nothing"


def group_by_name(placed: Mapping[Call, SowPlace], what: str) -> dict[Name, list[Call]]:
    """Group calls by their names; raise for a name that cannot be `what`, reaped or planted."""
    found: dict[Name, list[Call]] = {}
    for call in placed:
        found.setdefault(call.mark.collection.local_name, []).append(call)
    for name, (call, *_) in found.items():
        for scope in (name[:n] for n in range(1, len(name)) if name[:n] in found):
            raise SiteError(
                f"{show(name)}, sown at {call.mark.source}, is in a scope with the name of the "
                f"value {show(scope)}, sown at {found[scope][0].mark.source}. Rename one of them."
            )
    for name, calls in found.items():
        _check_calls(name, {call: placed[call].frames for call in calls}, what)
    return found


def _check_calls(name: Name, calls: Mapping[Call, Sequence[SowFrame]], what: str) -> None:
    """Raise if a name is sown several times in a way that its mode does not allow."""
    first = next(iter(calls))
    mode, treedef = first.mark.collection.mode, first.mark.collection.treedef
    again = f"Variable has already been {what}: {'/'.join(name)}."
    where = f"It is sown at {first.mark.source}"
    for call in calls:
        other = call.mark.collection
        if other.mode != mode and not ("clobber" in mode and "clobber" in other.mode):
            raise SiteError(
                f"{again} {where} in mode {mode!r}, and at {call.mark.source} in mode "
                f"{other.mode!r}. Rename one of them."
            )
        if other.treedef != treedef:
            raise SiteError(
                f"{show(name)} has two structures. {where} with the structure {treedef}, and at "
                f"{call.mark.source} with {other.treedef}. Rename one of them."
            )
    if mode == "strict" or (mode == "append" and what == "planted"):
        for a, b in itertools.combinations(calls, 2):
            leaves = a.mark.collection.index, b.mark.collection.index
            if leaves == (0, 0) and not _is_exclusive(calls[a], calls[b]):
                raise SiteError(
                    f"{again} It is sown at {a.mark.source}, and again at {b.mark.source}, in "
                    f"mode {mode!r}. Rename one of them, put one into a scope with `nest`, or sow "
                    "both in another mode."
                )


def _is_exclusive(a: Sequence[SowFrame], b: Sequence[SowFrame]) -> bool:
    """Return whether two places are in different branches of one conditional."""
    for one, two in zip(a, b, strict=False):
        if one != two:
            return one.kind is Kind.COND and one[:2] == two[:2]
    return False
