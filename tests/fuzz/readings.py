"""`readings(program, of)`: the requests of the picks of a program, as sets of its sites.

A selection has two sets: the sites that it picks, and those that it lets through where another
selection picks them. They differ for values that only rules mark: a glob does not pick them, but
lets through those in a scope of that name.

    >>> program = Program((Do("sin", "a"), Do("tanh", "b")), picks=(Pick((Not((Glob("a"),)),)),))
    >>> [reading.key for reading in readings(program, "value").kept]
    ['b']
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise, product

from .parts import has_part
from .program import Both, Either, Glob, Node, Not, Of, Pick, Program, Rule
from .sites import Site, sites

Labels = frozenset[str]


@dataclass(frozen=True)
class Reading:
    """The kept part of a site. `numbers`: the layer along each axis that loops over layers."""

    site: Site
    path: str
    numbers: tuple[tuple[int, int], ...]
    pick: Pick
    label: str = ""

    @property
    def key(self) -> str:
        """The name of the reading in the results."""
        return self.path + self.label + (f"@{self.site.call}" if self.site.call else "")

    @property
    def loop(self) -> int | None:
        """The axis of its steps: the innermost loop of the site that is not over layers."""
        pinned = dict(self.numbers)
        kinds = [(i, a.kind) for i, a in enumerate(self.site.axes) if i not in pinned]
        loops = [i for i, kind in kinds if kind in ("loop", "while")]
        return loops[-1] if loops else None

    @property
    def asked(self) -> tuple[object, ...]:
        """The key that distinguishes it from other readings of its path."""
        pick = self.pick
        return self.path, self.numbers, pick.step, pick.stop, pick.index, pick.by


@dataclass
class Readings:
    """The kept readings, and the reasons why a capture must, or may, raise.

    `exact` has the sites that one name picks; one of them must have a gradient.
    """

    kept: list[Reading] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)
    exact: list[list[Reading]] = field(default_factory=list)


def readings(program: Program, of: Of) -> Readings:
    """Return the readings of values or of gradients that the picks of a program request."""
    found = Readings()
    all_sites = sites(program, rules=True)
    by_site: dict[str, list[Reading]] = {}
    for pick in program.picks:
        for part in _flat(pick.body) if pick.of == of else ():
            asked = _read(part, pick, all_sites)
            if not asked and part != Glob("**"):  # `**` may pick nothing
                found.wrong.append(f"{part} picks nothing")
            if isinstance(part, Glob) and not set("*?") & set(part.pattern):
                found.exact.append(asked)
            kept = [r for r in asked if _is_kept(r)]
            if pick.by == "rms" and asked and not kept:
                found.wrong.append(f"{part} picks no real numbers")
            for reading in kept:
                by_site.setdefault(reading.site.label, []).append(reading)
    for asked in by_site.values():
        for reading in _named(asked, found.wrong):
            why = _misfit(reading)
            if why is None:
                found.kept.append(reading)
            else:
                found.wrong.append(why)
    if of == "grad":
        # The text of a program does not show which gradients exist.
        found.kept = [r for r in found.kept if r.site.grads and r.site.dtype != "int"]
        sums = [r for r in found.kept if r.site.grads > 1 and r.pick.by is not None]
        found.doubtful = found.wrong + [f"{r.key} may be the sum of several parts" for r in sums]
        found.wrong = [why for why in found.wrong if why.endswith("picks nothing")]
    return found


def _is_kept(reading: Reading) -> bool:
    return reading.pick.by != "rms" or reading.site.dtype != "int"


def _named(asked: list[Reading], wrong: list[str]) -> list[Reading]:
    """Return the readings of a site with separate names."""
    whole: dict[str, Reading] = {}
    reduced: dict[tuple[object, ...], Reading] = {}
    for reading in asked:
        if reading.pick.by is not None:
            reduced.setdefault(reading.asked, reading)
            continue
        known = whole.setdefault(reading.path, reading)
        if known.asked != reading.asked:
            wrong.append(f"two arrays of {reading.path}")
    out = [*reduced.values(), *whole.values()]
    counts = Counter(reading.path for reading in out)
    named = [
        Reading(r.site, r.path, r.numbers, r.pick, f":{r.pick.by}")
        if counts[r.path] > 1 and r.pick.by is not None
        else r
        for r in out
    ]
    twice = [key for key, count in Counter(r.key for r in named).items() if count > 1]
    wrong += [f"two arrays of the name {key}" for key in twice]
    return named


def _misfit(reading: Reading) -> str | None:
    """Return the reason why a site lacks the requested part."""
    site, pick, loop = reading.site, reading.pick, reading.loop
    if pick.index is not None and not has_part(pick.index, site.shape):
        return f"{reading.key} has no part {pick.index}"
    if pick.step is None:
        return None
    if loop is None:
        return f"{reading.key} is in no loop"
    axis = site.axes[loop]
    if axis.kind == "while" and (pick.step < 0 or (pick.stop or pick.step + 1) <= pick.step):
        return f"{reading.key} is in a while loop"
    if axis.kind == "loop" and pick.stop is None and not -axis.size <= pick.step < axis.size:
        return f"{reading.key} has no iteration {pick.step}"
    return None


def _flat(parts: tuple[Node, ...]) -> list[Node]:
    out = []
    for part in parts:
        out += _flat(part.body) if isinstance(part, Either) else [part]
    return out


def _read(part: Node, pick: Pick, all_sites: list[Site]) -> list[Reading]:
    if isinstance(part, Glob) and _is_numbered(part.pattern):
        return [
            Reading(site, path, numbers, pick)
            for site in all_sites
            for path, numbers in _layers(site, part.pattern)
            if not site.rule and _matches(part.pattern, path, site.call)
        ]
    picked, _ = _sets(part, all_sites)
    return [Reading(site, site.name, (), pick) for site in all_sites if site.label in picked]


def _is_numbered(pattern: str) -> bool:
    return any(segment.isdigit() for segment in pattern.split("/"))


def _layers(site: Site, pattern: str) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    """Return the names of a site in single layers, and the numbers of the layers.

    A layer is single if the pattern has a number after the name of its scope.
    """
    out = []
    pairs = list(pairwise(pattern.split("/")))
    choices = []
    for axis, path in site.layers:
        scope, size = path.split("/")[-1], site.axes[axis].size
        numbers = [int(k) for name, k in pairs if name == scope and k.isdigit()]
        choices.append([None, *(k for k in numbers if k < size)])
    for chosen in product(*choices):
        numbers = tuple(
            (axis, k) for (axis, _), k in zip(site.layers, chosen, strict=True) if k is not None
        )
        if numbers:
            segments = site.name.split("/")
            for axis, k in reversed(numbers):
                segments.insert(dict(site.layers)[axis].count("/") + 1, str(k))
            out.append(("/".join(segments), numbers))
    return out


def _sets(part: Node, all_sites: list[Site]) -> tuple[Labels, Labels]:
    """Return the sites that a selection picks, and those that it lets through."""
    match part:
        case Glob(pattern):
            picked = {s.label for s in all_sites if _matches(pattern, s.name, s.call)}
            inside = {s.label for s in all_sites if s.rule and _is_in(pattern, s)}
            plain = {s.label for s in all_sites if not s.rule}
            return Labels(picked & plain), Labels(picked | inside)
        case Rule(name):
            marked = {s.label for s in all_sites if s.rule and s.name.split("/")[-1] == name}
            return Labels(marked), Labels(marked)
        case Both(body):
            picked, admitted = _either(body, all_sites)
            admitted = functools.reduce(Labels.intersection, (_sets(p, all_sites)[1] for p in body))
            return picked & admitted, admitted
        case Either(body):
            return _either(body, all_sites)
        case Not(body):
            _, admitted = _either(body, all_sites)
            rest = Labels(s.label for s in all_sites) - admitted
            return rest - {s.label for s in all_sites if s.rule}, rest
    raise AssertionError(part)


def _either(body: tuple[Node, ...], all_sites: list[Site]) -> tuple[Labels, Labels]:
    both = [_sets(part, all_sites) for part in body]
    return Labels().union(*(p for p, _ in both)), Labels().union(*(a for _, a in both))


def _is_in(pattern: str, site: Site) -> bool:
    """Return whether a scope around a site has the name."""
    segments = site.name.split("/")
    paths = ["/".join(segments[:k]) for k in range(1, len(segments))]
    return any(_matches(pattern, path, site.call) for path in paths)


def _matches(pattern: str, path: str, call: int) -> bool:
    pattern, _, number = pattern.partition("@")
    return number in ("", str(call)) and _fits(pattern.split("/"), path.split("/"))


def _fits(pattern: list[str], path: list[str]) -> bool:
    """Return whether a pattern matches a path; `**` matches any number of segments."""
    if not pattern or not path:
        return not path and all(segment == "**" for segment in pattern)
    if pattern[0] == "**":
        return _fits(pattern[1:], path) or _fits(pattern, path[1:])
    return fnmatchcase(path[0], pattern[0]) and _fits(pattern[1:], path[1:])
