"""Numbers: what a monitor asks for, and how what comes back gets its names.

A monitor asks for many statistics at once, some for its records and some for its alerts, perhaps
several of one site. `Asked` is one of them. Its result is found again by a key, that of a dict
which its reducer returns: so a statistic of a value is never taken for one of a gradient, or for
another of the same name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tapax._results.site_table import SiteTable
from tapax._sites.selections import At, check, flatten, matches
from tapax._sites.site import Site
from tapax.monitoring._log import Histogram, Number
from tapax.reduce import Reducer


@dataclasses.dataclass(frozen=True)
class Asked:
    """A statistic of the values, or of the gradients, of some sites."""

    kind: str
    selection: Any
    reducer: Reducer
    stat: str
    key: str

    @property
    def mapping(self) -> dict[Any, Reducer]:
        """What to ask a capture for."""
        return {self.selection: _keyed(self.reducer, self.key)}


@functools.lru_cache(maxsize=1024)
def _keyed(reducer: Reducer, key: str) -> Reducer:
    # Kept, so that monitors that ask for the same are equal, and the step is traced once for them.
    finish = reducer.finish
    return dataclasses.replace(reducer, finish=lambda state: {key: finish(state)})


class Reading(NamedTuple):
    """A number that was asked for: of which site, in which iteration, by which name."""

    asked: Asked
    label: str
    stat: str
    number: Number

    @property
    def name(self) -> str:
        return f"{self.label}/{self.asked.kind}_{self.stat}"


def ask(kind: str, selection: Any, default: Reducer) -> Iterator[tuple[Any, Reducer]]:
    """Each selection in one, with each of its reducers; with `default`, if it has none."""
    argument = f"{kind}s"
    if isinstance(selection, Mapping):
        for part in flatten(check(selection, argument, reducing=True)):
            for reducer in part.reducers:
                yield part.selection, reducer
    elif isinstance(selection, (list, tuple)):
        for part in selection:
            yield from ask(kind, part, default)
    elif selection is not None:
        yield check(selection, argument), default


def numbered(kind: str, asked: Sequence[tuple[Any, Reducer]]) -> list[Asked]:
    """What is asked for, each with a key, and those of one name that differ with two names."""
    labels: dict[str, set[Reducer]] = {}
    stats: dict[str, Reducer] = {}
    for _, reducer in asked:
        labels.setdefault(reducer.label, set()).add(reducer)
    made = []
    for i, (selection, reducer) in enumerate(asked):
        stat = reducer.label if len(labels[reducer.label]) == 1 else str(reducer)
        if stats.setdefault(stat, reducer) != reducer:
            raise TypeError(
                f"`{kind}s` has two reducers with the name {stat!r}, which would be one in the "
                "record. Give them two: Reducer(..., name=...)."
            )
        made.append(Asked(kind, selection, reducer, stat, f"{kind}#{i}"))
    return made


class Slot(NamedTuple):
    """Where the numbers of one result go: the places along its axes of loops, and their labels."""

    name: str
    asked: Asked
    stat: str
    places: tuple[tuple[tuple[int, ...], str], ...]


def layout(asked: Sequence[Asked], sites: SiteTable) -> list[Slot]:
    """A slot for each result of what was asked for. It is the same for every step of a shape."""
    by_key = {a.key: a for a in asked}
    slots = []
    for site in sites:
        base, key, leaf = _parted(site.path)
        one = by_key[key]
        stat = f"{one.stat}.{leaf}" if leaf else one.stat
        own = dataclasses.replace(site, path=base)
        slots.append(Slot(site.name, one, stat, tuple(_places(one, own))))
    return slots


def _parted(path: str) -> tuple[str, str, str]:
    """The path of a site as it was marked, the key of what was asked for, and the leaf of that."""
    found = re.fullmatch(r"(.*?):(?:[^:/]*\.)?((?:value|grad)#\w+)(?:\.(.*))?", path)
    assert found is not None, path
    return found[1], found[2], found[3] or ""


def _places(asked: Asked, site: Site) -> Iterator[tuple[tuple[int, ...], str]]:
    loops = _iterations(asked, site)
    ranges = [loop for loop in loops if not isinstance(loop, int)]
    for place in itertools.product(*(range(len(r)) for r in ranges)):
        along = iter([r[i] for r, i in zip(ranges, place, strict=True)])
        index = ",".join(str(loop if isinstance(loop, int) else next(along)) for loop in loops)
        yield place, f"{site.name}[{index}]" if index else site.name


def _iterations(asked: Asked, site: Site) -> list[Any]:
    """The iterations along each axis of a loop; a number for a loop of which one was asked for."""
    if asked.reducer.over_loops:
        return []
    step = _step(asked.selection, site)
    found: list[Any] = []
    for i, loop in enumerate(site.loops):
        size = re.search(r"\[(\d+)\]", loop)
        if step is not None and i == len(site.loops) - 1:
            every = range(int(size[1])) if size else range(2**31)
            found.append(every[step] if isinstance(step, int) else every[step.slice])
        elif size is not None:  # a while loop has no axis
            found.append(range(int(size[1])))
    return found


def _step(selection: Any, site: Site) -> Any:
    parts = list(flatten(selection))
    if not any(isinstance(part, At) for part in parts):
        return None
    part = next((part for part in parts if matches(part, site)), None)
    return part.step if isinstance(part, At) else None


def read(
    slots: Sequence[Slot], arrays: Mapping[str, Any], valid: Mapping[str, Any]
) -> Iterator[Reading]:
    """What was captured, arrays of NumPy by name, as numbers: those of iterations that ran."""
    for name, asked, stat, places in slots:
        array = np.asarray(arrays[name])
        mask = valid.get(name)
        if mask is not None:
            mask = np.asarray(mask).astype(bool)
        for place, label in places:
            if mask is None or mask[place[: mask.ndim]].any():
                for one, number in labelled(asked.reducer, stat, array[place]):
                    yield Reading(asked, label, one, number)


def labelled(reducer: Reducer, stat: str, array: Any) -> Iterator[tuple[str, Number]]:
    """The numbers in a result, each with the name of its statistic."""
    if reducer.edges is not None:
        yield stat, Histogram(array.astype(np.float64), np.array(reducer.edges))
        return
    if np.iscomplexobj(array):
        yield from labelled(reducer, f"{stat}.real", array.real)
        yield from labelled(reducer, f"{stat}.imag", array.imag)
        return
    array = np.asarray(array, np.float64)
    if reducer.labels is not None and array.shape[-1:] == (len(reducer.labels),):
        suffix = stat.removeprefix(reducer.name)
        for i, label in enumerate(reducer.labels):
            yield label + suffix, _number(array[..., i])
    else:
        yield stat, _number(array)


def _number(array: np.ndarray) -> Number:
    return array if array.ndim else float(array)
