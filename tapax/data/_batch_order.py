"""The order in which batches read the rows of a dataset: a shuffle in two levels, from a seed.

The first level shuffles the shards, and divides them into windows of a few shards. The second level
shuffles the rows within each window. So batches that are read at about the same time need only a
few shards, which the operating system keeps in memory, and every row comes once. The rows of a
batch depend on nothing that comes before them, so a reader can start anywhere. `docs/format.md`
says how well the rows are mixed.

The order of several batches is computed at a time: with many short operations of NumPy, threads
that read ahead would wait for each other.

>>> order = BatchOrder([4, 4, 4], size=5, seed=0)
>>> sorted(n for batch in range(len(order)) for n in order.rows(batch).tolist()) == [*range(12)]
True
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import numpy as np

from tapax.data._shuffle import shuffled, shuffled_at

WINDOW = 16
"""The default number of shards whose rows are mixed."""
_SHARDS, _ROWS = 0, 1
"""Distinguish the keys of the two levels."""
_PLACES = 1 << 16
"""The approximate number of places of the order that are computed at a time."""


class BatchOrder:
    """The numbers of the rows of each batch, in the order of the dataset if `seed` is None.

    `counts` has the number of rows of each shard. The last batch may have fewer rows than `size`;
    `drop_remainder` omits it.
    """

    def __init__(
        self,
        counts: Sequence[int],
        size: int,
        seed: int | None,
        window: int = WINDOW,
        drop_remainder: bool = False,
    ):
        self._counts = np.asarray(counts, np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        self._total = int(self._counts.sum())
        self._size, self._seed, self._window = size, seed, window
        self._batches = self._total // size if drop_remainder else -(-self._total // size)
        self._together = max(_PLACES // size, 1)
        self._lock = threading.Lock()
        self._shuffled = functools.lru_cache(maxsize=2)(self._shuffle)
        if seed is not None:
            self._shards = shuffled(len(self._counts), seed, _SHARDS)
            ends = np.cumsum(self._counts[self._shards])
            # A window ends after every `window` shards, and after the last shard.
            self._ends = np.append(ends[window - 1 : -1 : window], ends[-1:])

    def __len__(self) -> int:
        return self._batches

    def rows(self, batch: int) -> np.ndarray:
        """Return the numbers of the rows of a batch, in ascending order."""
        if self._seed is None:
            return np.arange(batch * self._size, min((batch + 1) * self._size, self._total))
        group, number = divmod(batch, self._together)
        with self._lock:
            rows = self._shuffled(group)
        return np.sort(rows[number * self._size : (number + 1) * self._size])

    def _shuffle(self, group: int) -> np.ndarray:
        """Return the rows of a group of batches, in the order of the shuffled dataset."""
        places = self._together * self._size
        start, stop = group * places, min((group + 1) * places, self._total)
        first, last = (int(n) for n in np.searchsorted(self._ends, [start, stop - 1], "right"))
        return np.concatenate([self._rows_of(w, start, stop) for w in range(first, last + 1)])

    def _rows_of(self, window: int, start: int, stop: int) -> np.ndarray:
        """Return the rows of a window that the shuffled dataset has from `start` to `stop`."""
        assert self._seed is not None
        begin = int(self._ends[window - 1]) if window else 0
        count = int(self._ends[window]) - begin
        places = np.arange(max(start - begin, 0), min(stop - begin, count))
        shards = self._shards[window * self._window : (window + 1) * self._window]
        ends = np.cumsum(self._counts[shards])
        numbers = shuffled_at(places, count, self._seed, _ROWS, window)
        offsets = self._starts[shards] - (ends - self._counts[shards])
        return numbers + offsets[np.searchsorted(ends, numbers, "right")]
