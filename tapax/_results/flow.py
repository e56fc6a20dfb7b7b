"""The flow of data between the sites of a program.

Data flow from one site to another if a value of the first reaches the second without passing a
third site. `_walk/site_flow.py` finds the flow of a traced program.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

LIMIT = 32
"""The largest number of sites from which data flow to one site.

A program that adds up the results of thousands of sites has one site to which data of all of them
flow, and a set of sites for each partial sum. The limit keeps the work linear.
"""


class FlowSite(NamedTuple):
    """A site: its name, and the shape and dtype of its value in one iteration."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Flow:
    """The flow of data between sites.

    Attributes:
        sites: The sites, in the order of the program.
        edges: Pairs of numbers of sites, from the first to the second. An edge to the same or an
            earlier site goes through the carry of a loop.
        limited: The numbers of the sites to which data of more than `LIMIT` sites flow. The edges
            have the last `LIMIT` of these.
    """

    sites: tuple[FlowSite, ...]
    edges: tuple[tuple[int, int], ...]
    limited: frozenset[int] = frozenset()

    def between(self, names: Collection[str]) -> Flow:
        """Return the flow between the sites with these names, through all other sites."""
        kept = [site.name in names for site in self.sites]
        if all(kept):
            return self
        sources: list[list[int]] = [[] for _ in self.sites]
        for source, target in self.edges:
            sources[target].append(source)
        # The sites with a name that data reach last before they reach site i.
        last: list[frozenset[int]] = [frozenset() for _ in self.sites]
        limited = {i: i in self.limited for i in range(len(self.sites))}
        is_growing = True
        while is_growing:  # once for the program, and then for edges through carries
            is_growing = False
            for i, below in enumerate(sources):
                found: set[int] = set()
                for source in below:
                    found |= {source} if kept[source] else last[source]
                is_limited = limited[i] or any(limited[s] for s in below if not kept[s])
                reached, is_cut = keep_last(found)
                if reached != last[i] or (is_limited or is_cut) != limited[i]:
                    last[i], limited[i] = reached, is_limited or is_cut
                    is_growing = True
        numbers = {old: new for new, old in enumerate(i for i, keep in enumerate(kept) if keep)}
        edges = tuple((numbers[s], numbers[i]) for i in numbers for s in sorted(last[i]))
        sites = tuple(self.sites[i] for i in numbers)
        return Flow(sites, edges, frozenset(numbers[i] for i in numbers if limited[i]))

    def to_json(self) -> dict[str, Any]:
        """Convert the flow to plain data."""
        return {
            "sites": [[site.name, list(site.shape), site.dtype] for site in self.sites],
            "edges": [list(edge) for edge in self.edges],
            "limited": sorted(self.limited),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Flow:
        """Make a flow from the plain data of `to_json`."""
        sites = (FlowSite(name, tuple(shape), dtype) for name, shape, dtype in content["sites"])
        edges = tuple((int(source), int(target)) for source, target in content["edges"])
        return cls(tuple(sites), edges, frozenset(content["limited"]))


def keep_last(sites: Collection[int]) -> tuple[frozenset[int], bool]:
    """Return the last `LIMIT` of the numbers of sites, and whether there are more."""
    if len(sites) <= LIMIT:
        return frozenset(sites), False
    return frozenset(sorted(sites)[-LIMIT:]), True


class LazyFlow:
    """The flow of a program, which is found when somebody first asks for it."""

    def __init__(self, find: Callable[[], Flow]):
        self._find: Callable[[], Flow] | None = find
        self._found: Flow | None = None
        self._lock = threading.Lock()

    def get(self) -> Flow:
        """Find the flow, or return the flow that was found before."""
        with self._lock:
            if self._found is None:
                assert self._find is not None
                self._found, self._find = self._find(), None
            return self._found


def name_edges(flow: Flow) -> Sequence[tuple[str, str]]:
    """Return the names of the sites that each edge joins."""
    return [(flow.sites[source].name, flow.sites[target].name) for source, target in flow.edges]
