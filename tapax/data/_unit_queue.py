"""The units that a worker does, and their order: its own, then those that nobody has done.

Workers have no coordinator, hold no leases and read no clock. A worker begins with its own units.
Then it goes through all others in a random order of its own, so that two workers seldom meet, and
does those whose shards are not there. So the fast ones relieve the slow ones, whoever was killed is
replaced by all others, and every worker ends when the dataset is complete. A unit may be done
twice, if its shard comes late into sight; both shards are the same, and one stays.

Little is asked of the storage: one lookup a unit, and a listing whenever half of what the last one
left open has turned out to be done.

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
"""How many units may turn out to be done before the storage is listed again."""


class UnitStorage(Protocol):
    """Tells which units are done. It may learn of them late."""

    def units_done(self) -> Collection[int] | np.ndarray:
        """Return the units that are done."""
        ...

    def is_done(self, unit: int) -> bool:
        """Look up one unit."""
        ...


class UnitQueue:
    """Iterates over the units that a worker is to do, looking each up when its turn comes.

    Without `take_over` they are only those of the worker itself.
    """

    def __init__(
        self, plan: UnitPlan, worker: Worker, storage: UnitStorage, *, take_over: bool = True
    ):
        self._plan, self._worker, self._storage = plan, worker, storage
        self._take_over = take_over
        self._settled = np.zeros(len(plan.units()), bool)
        """The units that are done, and those that this worker has begun."""

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
