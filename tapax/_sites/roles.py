"""The role and the depth of every row of a plot: `GPT/blocks/3/mlp` is the `mlp` of layer 3.

>>> place_rows(["GPT/embed", "GPT/blocks/0/mlp", "GPT/blocks/1/mlp"])["GPT/blocks/1/mlp"]
Place(role='mlp', stack='GPT/blocks', depth=(1,), is_layer=False)

Layers are numbered in one of three ways. A list of modules has the number in the path,
`blocks/3/mlp`, `Block_3/mlp`; the rest of the path is the role. A scan over layers has the number
of the iteration, `blocks/mlp[3]`. A module that a model calls repeatedly has the number of the
call, `block/mlp@3`: calls count as depth in a model without lists and scans. Calls between layers
have the depth of these layers.

A number inside a layer remains in the role, because it tells parts apart: `mlp/layers/0` expands
and `mlp/layers/2` contracts. More than `ALIKE` such parts, such as the experts of a mixture, have
one role without the number, which has several rows in a layer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tapax._sites.names import split_row

ALIKE = 4
"""The largest number of numbered parts of a layer that have a role each."""

Path: TypeAlias = "tuple[str, ...]"
Depth: TypeAlias = "tuple[int, ...]"
"""The numbers of a layer: `(3,)`, or `(1, 2)` for block 2 of stage 1."""

_INDEX = re.compile(r"(\d+)(\W.*)?", re.DOTALL)
_NUMBERED = re.compile(r"(.*[^\d_])_(\d+)(\W.*)?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a row: its role, its stack of layers, and the number of its layer (`depth`).

    `is_layer` is true for the result of a whole layer, and false for that of a part. A row outside
    of all layers has neither stack nor depth, and its role is its name.
    """

    role: str
    stack: str = ""
    depth: Depth = ()
    is_layer: bool = False

    @property
    def is_part(self) -> bool:
        """Return whether the row is the result of a part of a layer."""
        return bool(self.depth) and not self.is_layer


class _Number(NamedTuple):
    """A segment of a path with a number: `blocks_3:0` consists of `blocks`, 3 and `:0`."""

    name: str
    number: int
    leaf: str


@dataclasses.dataclass(frozen=True)
class _Row:
    """The parsed name of a row."""

    name: str
    path: Path
    call: int
    pullback: int
    iterations: Depth


@dataclasses.dataclass(frozen=True)
class _Part:
    """A row as a part of a layer: `names`, followed by the path from `start` on."""

    row: _Row
    stack: Path
    depth: Depth
    names: Path
    start: int


def place_rows(rows: Iterable[str]) -> dict[str, Place]:
    """Find the role and the depth of each row; `rows` are in the order of the program."""
    parsed = list(map(_parse, rows))
    families = _Families(parsed)
    parts = _split_iterations([row for row in parsed if row.iterations])
    parts += [part for row in parsed if (part := families.split(row)) is not None]
    parts = parts or _split_calls(parsed)
    found = dict(_name_roles(parts, families))
    places = _join_stacks({row.name: found.get(row.name, Place(row.name)) for row in parsed})
    return places | _place_shared(parsed, places)


def _last_segment(path: str) -> str:
    return path.rpartition("/")[2]


def _parse(name: str) -> _Row:
    path, call, pullback, iterations = split_row(name)
    return _Row(name, tuple(path.split("/")), call, pullback, iterations)


class _Families:
    """Modules whose paths differ in a number, by the path before it and the name around it."""

    def __init__(self, rows: Iterable[_Row]):
        self._numbers: dict[tuple[Path, str], set[int]] = {}
        self._plain: set[tuple[Path, str]] = set()
        self._parents: set[Path] = set()
        for path in dict.fromkeys(row.path for row in rows):
            for i, segment in enumerate(path):
                found = _split_number(segment)
                if found is None:
                    self._plain.add((_drop_numbers(path[:i]), segment))
                    continue
                family = _drop_numbers(path[:i]), found.name
                self._numbers.setdefault(family, set()).add(found.number)
                if i + 1 < len(path):
                    self._parents.add(_drop_numbers(path[: i + 1]))

    def find(self, path: Path, i: int) -> _Number | None:
        """Find the number in a segment, if there are siblings with other numbers."""
        found = _split_number(path[i])
        # Haiku and Keras call the first of several `linear`, and the second `linear_1`.
        found = _Number(path[i], 0, "") if found is None else found
        return found if self.count(path, i) > 1 else None

    def count(self, path: Path, i: int) -> int:
        """Count the modules that differ from a segment only in its number, including itself."""
        found = _split_number(path[i])
        family = _drop_numbers(path[:i]), path[i] if found is None else found.name
        numbers = self._numbers.get(family, set())
        return len(numbers | {0} if family in self._plain else numbers)

    def split(self, row: _Row) -> _Part | None:
        """Find the layer of a row by the numbers in its path; None if there are no numbers."""
        if row.iterations:
            return None
        path = row.path
        numbers = ((i, self.find(path, i)) for i in range(len(path)))
        at, found = next(((i, n) for i, n in numbers if n is not None), (0, None))
        if found is None:
            return None
        stack = (*path[:at], *filter(None, [found.name]))
        depth = [found.number]
        names: list[str] = []
        while (inner := self._find_inner(path, at + 1)) is not None:
            start, (at, found) = at + 1, inner
            names += [*path[start:at], *filter(None, [found.name])]
            depth.append(found.number)
        return _Part(row, stack, tuple(depth), (*names, *filter(None, [found.leaf])), at + 1)

    def _find_inner(self, path: Path, start: int) -> tuple[int, _Number] | None:
        """Find a numbered segment right below another, as in `stages/1/blocks/2`, with parts."""
        for i in range(start, min(start + 2, len(path))):
            found = self.find(path, i)
            if found is not None and (i == start or not found.name):
                return (i, found) if _drop_numbers(path[: i + 1]) in self._parents else None
        return None


def _split_iterations(rows: Sequence[_Row]) -> list[_Part]:
    """Treat iterations as layers: sites in loops of one length are parts of the same layers."""
    lengths: dict[Path, Depth] = {}
    for row in rows:
        known = lengths.get(row.path, (0,) * len(row.iterations))
        lengths[row.path] = tuple(map(max, known, row.iterations))
    parts: list[_Part] = []
    for length in dict.fromkeys(lengths.values()):
        members = [row for row in rows if lengths[row.path] == length]
        stack = _shared_path(members)
        parts += [_Part(row, stack, row.iterations, (), len(stack)) for row in members]
    return parts


def _split_calls(rows: Sequence[_Row]) -> list[_Part]:
    """Treat calls as layers: modules called equally often are parts of the same layers."""
    calls = _last_calls(rows)
    parts: list[_Part] = []
    for last in dict.fromkeys(number for number in calls.values() if number):
        members = [row for row in rows if calls[row.path] == last]
        stack = _shared_path(members)
        for row in members:
            depth, row = (row.call,), dataclasses.replace(row, call=0)
            parts.append(_Part(row, stack, depth, (), len(stack)))
    return parts


def _last_calls(rows: Iterable[_Row]) -> dict[Path, int]:
    calls: dict[Path, int] = {}
    for row in rows:
        calls[row.path] = max(calls.get(row.path, 0), row.call)
    return calls


def _shared_path(rows: Sequence[_Row]) -> Path:
    """Return the path of the layer that contains some rows."""
    paths = list(dict.fromkeys(row.path for row in rows))
    shared = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*paths, strict=False))
    stack = tuple(each[0] for each in shared)
    return stack[:-1] if len(paths) == 1 else stack


def _name_roles(parts: Sequence[_Part], families: _Families) -> Iterator[tuple[str, Place]]:
    calls = _last_calls(part.row for part in parts)
    for part in parts:
        row, names = part.row, list(part.names)
        for i in range(part.start, len(row.path)):
            alike = families.count(row.path, i) > ALIKE
            names.append(_drop_number(row.path[i]) if alike else row.path[i])
        stack, role = "/".join(part.stack), ""
        for name in filter(None, names):
            role += name if name[0] in ":." or not role else f"/{name}"
        is_layer = not role
        if is_layer or role[0] in ":.":
            role = _last_segment(stack) + role
        if row.call and calls[row.path] < ALIKE:
            role += f"@{row.call}"
        if row.pullback:
            role += f"~{row.pullback}"
        yield row.name, Place(role, stack, part.depth, is_layer)


def _join_stacks(places: Mapping[str, Place]) -> dict[str, Place]:
    """Join the stacks of lists that the program runs through together: `attns/0`, `mlps/0` ..."""
    spans: dict[str, tuple[int, int]] = {}
    for i, place in enumerate(places.values()):
        if place.depth:
            spans[place.stack] = spans.get(place.stack, (i, i))[0], i
    joined: list[list[str]] = []
    end = -1
    for stack, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first > end:
            joined.append([])
        joined[-1].append(stack)
        end = max(end, last)
    names = {stack: " and ".join(group) for group in joined for stack in group}
    found: dict[str, Place] = {}
    for name, place in places.items():
        if names.get(place.stack, place.stack) != place.stack:
            prefix = "" if place.is_layer else f"{_last_segment(place.stack)}/"
            place = Place(prefix + place.role, names[place.stack], place.depth)
        found[name] = place
    return found


def _place_shared(rows: Sequence[_Row], places: Mapping[str, Place]) -> dict[str, Place]:
    """Place each call of a module that several layers share at the layer after the call."""
    following: dict[str, Place] = {}
    coming: Place | None = None
    begun = False
    for row in reversed(rows):
        place = places[row.name]
        coming = place if place.depth else coming
        if coming is not None:
            following[row.name] = coming
    shared: dict[Path, bool] = {}
    for row in rows:
        begun |= bool(places[row.name].depth)
        if not places[row.name].depth:
            # Its last call comes after the first layer, and before the last.
            shared[row.path] = begun and bool(row.call) and row.name in following
    return {
        row.name: dataclasses.replace(
            following[row.name], role="/".join(row.path[1:] or row.path), is_layer=False
        )
        for row in rows
        if shared.get(row.path)
    }


# The paths of thousands of sites have few different segments.
@functools.lru_cache(maxsize=2**16)
def _split_number(segment: str) -> _Number | None:
    if (found := _INDEX.fullmatch(segment)) is not None:
        return _Number("", int(found[1]), found[2] or "")
    if (found := _NUMBERED.fullmatch(segment)) is not None:
        return _Number(found[1], int(found[2]), found[3] or "")
    return None


@functools.lru_cache(maxsize=2**16)
def _drop_number(segment: str) -> str:
    found = _split_number(segment)
    return segment if found is None else found.name + found.leaf


@functools.lru_cache(maxsize=2**16)
def _drop_numbers(path: Path) -> Path:
    return tuple(map(_drop_number, path))
