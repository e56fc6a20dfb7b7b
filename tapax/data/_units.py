"""Units of work: their number, their batches and shards, and the share of each worker.

A unit is a range of batches whose rows become one shard, or one shard for each of several processes
that run one program. Everything here is a pure function of numbers, without clocks, files or
activations. A unit is done when its shards are in the folder, so the list of shards alone says
which units remain, and any process may do them.

>>> plan = UnitPlan(batches=10, batches_per_unit=3)
>>> [list(plan.batch_numbers(unit)) for unit in plan.units()]
[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tapax._sites import wrong_type
from tapax.data._arguments import as_integer
from tapax.data._shuffle import shuffled


@dataclasses.dataclass(frozen=True)
class Worker:
    """One of `count` workers; its share is the units `index`, `index + count`, ..."""

    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, pair: Any) -> Worker:
        """Check the argument `worker`."""
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise wrong_type("`worker` takes two integers, (i, n) for worker i of n, but is", pair)
        index, count = (as_integer("worker", number) for number in pair)
        if not 0 <= index < count:
            raise ValueError(
                f"`worker` is ({index}, {count}), but of {count} workers the first is 0 and the "
                f"last is {count - 1}."
            )
        return cls(index, count)

    def __str__(self) -> str:
        return f"worker {self.index} of {self.count}"


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """The units of a harvest.

    `batches` is the number of batches, or None for an iterable, whose length is unknown. A `seed`
    deals the batches out to the units in a random order, so that every shard has rows from all
    parts of the data. Each unit has `parts` shards; the shards of all units are numbered together.
    """

    batches: int | None
    batches_per_unit: int
    seed: int | None = None
    parts: int = 1

    @property
    def count(self) -> int | None:
        """The number of units; None if the number of batches is unknown."""
        return None if self.batches is None else -(-self.batches // self.batches_per_unit)

    def units(self) -> range:
        """Return the numbers of all units."""
        if self.count is None:
            raise ValueError("The number of units is not known before the batches end.")
        return range(self.count)

    @property
    def shard_count(self) -> int | None:
        """The number of shards; None if the number of batches is unknown."""
        return None if self.count is None else self.count * self.parts

    def shards(self, unit: int) -> range:
        """Return the numbers of the shards of a unit."""
        return range(unit * self.parts, (unit + 1) * self.parts)

    def shard(self, unit: int, part: int) -> int:
        """Return the number of the shard of a unit that the process `part` writes."""
        return unit * self.parts + part

    def units_done(self, shards: Collection[int]) -> np.ndarray:
        """Return the units whose shards are all in `shards`."""
        units, found = np.unique(np.fromiter(shards, np.int64) // self.parts, return_counts=True)
        return units[found == self.parts]

    def batch_numbers(self, unit: int) -> Sequence[int]:
        """Return the numbers of the batches of a unit, in the order of their rows."""
        start = unit * self.batches_per_unit
        stop = start + self.batches_per_unit
        if self.batches is not None:
            stop = min(stop, self.batches)
        if self.seed is None:
            return range(start, stop)
        return [int(number) for number in self._order[start:stop]]

    @functools.cached_property
    def _order(self) -> np.ndarray:
        assert self.batches is not None and self.seed is not None
        return shuffled(self.batches, self.seed)
