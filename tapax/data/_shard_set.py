"""The shards of a dataset as one sequence of rows, in the order of their units."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tapax._jax import Value
from tapax.data._folder import DatasetFolder
from tapax.data._mapped_shard import MappedShard
from tapax.data._shard_format import ShardError

_MAPPED = 1024
"""The largest number of shards that stay mapped; the operating system limits mappings."""
_RESIDENT = 1 << 32
"""The approximate number of bytes of mapped shards that the process keeps in memory."""


class ShardSet:
    """The shards of `units`, read as one sequence of rows.

    `counts` has the number of rows of each unit, and `hash` is the hash of the manifest.
    """

    def __init__(
        self, folder: DatasetFolder, units: Sequence[int], counts: Sequence[int], hash: str
    ):
        self._folder, self._hash = folder, hash
        self.units = list(units)
        self.counts = np.asarray(counts, np.int64)
        self.ends = np.cumsum(self.counts)
        self._mapped: collections.OrderedDict[int, MappedShard] = collections.OrderedDict()
        self._resident: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._resident_bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        # A worker process may have another current folder.
        folder = DatasetFolder(self._folder.path.absolute())
        return ShardSet, (folder, self.units, self.counts, self._hash)

    @property
    def rows(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def shard(self, place: int) -> MappedShard:
        """Return the shard at a place among the shards, and map it if necessary."""
        with self._lock:
            shard = self._mapped.get(place)
            if shard is None:
                shard = self._map(place)
            if next(reversed(self._mapped), None) != place:
                self._mapped.move_to_end(place)
                self._release_pages(place, shard.header.nbytes)
            return shard

    def _map(self, place: int) -> MappedShard:
        shard = MappedShard(self._folder.shard_path(self.units[place]), self._hash)
        if shard.header.unit != self.units[place]:
            raise ShardError(
                f"The shard {str(shard.path)!r} contains unit {shard.header.unit} instead of the "
                "unit of its name."
            )
        if shard.rows != self.counts[place]:
            raise ShardError(
                f"The shard {str(shard.path)!r} has {shard.rows} rows, but the index of the "
                f"dataset says {self.counts[place]}."
            )
        self._mapped[place] = shard
        self._release_pages(place, shard.header.nbytes)
        if len(self._mapped) > _MAPPED:
            oldest, _ = self._mapped.popitem(last=False)
            self._resident_bytes -= self._resident.pop(oldest, 0)
        return shard

    def _release_pages(self, place: int, nbytes: int) -> None:
        """Record that a shard is in use, and release the memory of the least recently used."""
        self._resident_bytes += nbytes - self._resident.pop(place, 0)
        self._resident[place] = nbytes
        while self._resident_bytes > _RESIDENT and len(self._resident) > 1:
            oldest, released = self._resident.popitem(last=False)
            self._resident_bytes -= released
            self._mapped[oldest].release_pages()

    def row_numbers(self, index: Value) -> np.ndarray:
        """Convert a list of rows, or a mask of all rows, to the numbers of the rows."""
        index = np.asarray(index)
        if index.dtype == bool:
            if index.shape != (self.rows,):
                raise IndexError(
                    f"A mask of rows needs the shape [{self.rows}], but has {list(index.shape)}."
                )
            return np.flatnonzero(index)
        if index.size == 0:
            index = index.astype(np.int64)
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
            raise IndexError(
                "Rows are chosen by an integer, a slice, a list of integers or a mask, not by an "
                f"array of type {index.dtype}{list(index.shape)}."
            )
        index = index.astype(np.int64)
        wrong = (index < -self.rows) | (index >= self.rows)
        if wrong.any():
            raise IndexError(
                f"The dataset has {self.rows} rows, so there is no row {index[wrong][0]}."
            )
        return np.where(index < 0, index + self.rows, index)

    def slices(self, key: str, start: int, stop: int) -> list[np.ndarray]:
        """Return the rows from `start` to `stop` of an array: a view for each shard."""
        if stop <= start:
            return []
        first, last = (int(n) for n in np.searchsorted(self.ends, [start, stop - 1], "right"))
        found: list[np.ndarray] = []
        for place in range(first, last + 1):
            offset = int(self.ends[place] - self.counts[place])
            low, high = max(start - offset, 0), min(stop - offset, int(self.counts[place]))
            if high > low:
                found.append(self.shard(place).slice(key, low, high))
        return found

    def take(self, key: str, numbers: np.ndarray, out: np.ndarray) -> None:
        """Copy the rows with the given `numbers`, which ascend, to `out`."""
        places = np.searchsorted(self.ends, numbers, "right")
        starts = np.flatnonzero(np.diff(places, prepend=-1, append=-1))
        for start, stop in itertools.pairwise(starts):
            place = int(places[start])
            offset = self.ends[place] - self.counts[place]
            self.shard(place).take(key, numbers[start:stop] - offset, out[start:stop])
