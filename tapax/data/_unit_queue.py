"""The order in which a worker does units: first its share, then the units that nobody has done.

Workers need no coordinator, leases or clock. A worker begins with its share of the units. Then it
visits all other units in a random order that differs between workers, so that two workers seldom
meet, and does the units whose shards are missing. So fast workers relieve slow ones, all workers
replace a worker that was killed, and every worker ends when the dataset is complete. If a shard
becomes visible late, two workers may do its unit; their shards are equal, and one of them stays.

The load on the storage is small: one lookup for each unit, and a new listing whenever more than
half of the units that were looked up since the last listing turned out to be done.

>>> class Folder:
...     def units_done(self):
...         return [0, 3]
...
...     def is_done(self, unit):
...         return unit in (0, 3)
>>> units = list(UnitQueue(UnitPlan(6, 1), Worker(1, 3), Folder()))
>>> units[:2], sorted(units[2:])
([1, 4], [2, 5])
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Protocol

import numpy as np

from tapax.data._shuffle import shuffled
from tapax.data._units import UnitPlan, Worker

_LATE = 8
"""The number of units that may turn out to be done before the storage is listed anew."""


class UnitStorage(Protocol):
    """A record of the units that are done, which may be late."""

    def units_done(self) -> Collection[int] | np.ndarray:
        """Return the units that are done."""
        ...

    def is_done(self, unit: int) -> bool:
        """Return whether a unit is done."""
        ...


class UnitQueue:
    """An iterable of the units that a worker has to do, which looks up each unit at its turn.

    Without `take_over`, it has only the share of the worker.
    """

    def __init__(
        self, plan: UnitPlan, worker: Worker, storage: UnitStorage, *, take_over: bool = True
    ):
        self._plan, self._worker, self._storage = plan, worker, storage
        self._take_over = take_over
        self._settled = np.zeros(len(plan.units()), bool)
        """True for each unit that is done or that this worker has begun."""

    def __iter__(self) -> Iterator[int]:
        self._list_done()
        for unit in self._plan.units()[self._worker.index :: self._worker.count]:
            if not self._settled[unit]:
                self._settled[unit] = True
                if not self._storage.is_done(unit):
                    yield unit
        if self._take_over:
            yield from self._others()

    def _others(self) -> Iterator[int]:
        for turn in itertools.count():
            self._list_done()
            left = np.flatnonzero(~self._settled)
            if not len(left):
                return
            order = shuffled(len(left), self._worker.index, self._worker.count, turn)
            begun = late = 0
            for unit in left[order].tolist():
                self._settled[unit] = True
                if not self._storage.is_done(unit):
                    begun += 1
                    yield unit
                    continue
                late += 1
                if late > max(begun, _LATE):
                    break

    def _list_done(self) -> None:
        done = self._storage.units_done()
        numbers = done if isinstance(done, np.ndarray) else np.fromiter(done, np.int64)
        self._settled[numbers[numbers < len(self._settled)]] = True
