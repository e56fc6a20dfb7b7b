"""The pipeline of a harvest: batches to the device, rows to the host, shards to the disk.

One thread reads batches and dispatches them, a few ahead of the batch whose rows it collects.
Meanwhile copies to the host run, and other threads write the shards of finished units. So the
harvest takes as long as its slowest stage, and its memory does not grow with the dataset.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from tapax._jax import PyTree, gather
from tapax._marks.user_warning import warn_user
from tapax._sites import SiteError
from tapax.data._columns import Beside, Keep, make_columns, read_mask, spread_mask
from tapax.data._folder import DatasetFolder
from tapax.data._free_memory import FreeMemory
from tapax.data._manifest import DatasetArray, Manifest
from tapax.data._meter import Meter
from tapax.data._process_group import PendingRows, Processes
from tapax.data._row_program import RowBatch, RowProgram, RowSite
from tapax.data._shard_writer import write_shard
from tapax.data._statistics import Statistics
from tapax.data._transfer import PendingCopy, start_small_copies
from tapax.data._writer_threads import ShardWriters, writer_count

AHEAD = 2
"""The number of batches that are dispatched ahead of the batch whose rows are collected."""

_NOT_FINITE = (
    "there are values that are not finite. Their rows are stored, left out of the statistics, and "
    "counted in `acts.stats[site].nonfinite`"
)
_OVERFLOWED = (
    "there are values too large for the type in which they are stored. Choose another `dtype`; "
    "such rows are counted in `acts.stats[site].overflowed`"
)


@dataclasses.dataclass(frozen=True)
class BatchTask:
    """A batch to harvest: its unit, its number, and whether it ends the unit."""

    unit: int
    number: int
    batch: PyTree
    ends_unit: bool


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    """A batch that the device is computing."""

    task: BatchTask
    copies: Mapping[str, PendingCopy | PendingRows]
    columns: dict[str, np.ndarray]
    result: RowBatch


_Chunk = PendingCopy | PendingRows | np.ndarray
"""The rows of one batch, whose copy to the host may still be running."""


class _UnitRows:
    """The rows of a unit, which grow batch by batch."""

    def __init__(self, unit: int, names: Sequence[str]):
        self.unit = unit
        self.statistics: dict[str, Statistics] = {}
        self._chunks: dict[str, list[_Chunk]] = {name: [] for name in names}

    def add(self, arrays: dict[str, _Chunk], statistics: dict[str, Statistics]) -> None:
        for name, x in arrays.items():
            self._chunks[name].append(x)
        for name, found in statistics.items():
            known = self.statistics.get(name)
            self.statistics[name] = found if known is None else known.merge(found)

    def take_chunks(self) -> dict[str, list[np.ndarray]]:
        """Return the rows as NumPy arrays, and release the memory with their copies."""
        return {
            name: [_to_numpy(parts.pop(0)) for _ in range(len(parts))]
            for name, parts in self._chunks.items()
        }


def _to_numpy(chunk: _Chunk) -> np.ndarray:
    return chunk if isinstance(chunk, np.ndarray) else chunk.rows()


class Pipeline:
    """The pipeline from batches to the shards of their units."""

    def __init__(
        self,
        program: RowProgram,
        folder: DatasetFolder,
        manifest: Manifest,
        keep: Keep,
        beside: Beside,
        meter: Meter,
        owner: str,
        processes: Processes,
    ):
        self._program, self._folder, self._manifest = program, folder, manifest
        self._keep, self._beside = keep, beside
        self._meter, self._owner, self._processes = meter, owner, processes
        self._names = [array.name for array in manifest.arrays]
        self._hash = manifest.hash
        self._unit: _UnitRows | None = None
        self._warned: set[str] = set()
        self._free_memory = FreeMemory()

    def run(self, tasks: Iterable[BatchTask]) -> None:
        """Harvest all tasks, in which the batches of a unit are consecutive."""
        writers = ShardWriters(writer_count())
        try:
            for batch in self._dispatch_all(tasks):
                self._collect(batch, writers)
            with self._meter.waiting_for("disk"):
                writers.finish()
        except Exception:
            # Write the finished units although a later one failed.
            with contextlib.suppress(Exception):
                writers.finish()
            raise
        finally:
            writers.stop()

    def _dispatch_all(self, tasks: Iterable[BatchTask]) -> Iterator[_Dispatched]:
        """Dispatch batches, and yield each batch once `AHEAD` more are dispatched.

        If a batch raises, the earlier batches come before the error, since they may finish units.
        """
        dispatched: collections.deque[_Dispatched] = collections.deque()
        error = None
        try:
            for task in tasks:
                with self._meter.waiting_for("device"):
                    dispatched.append(self._dispatch(task))
                if len(dispatched) > AHEAD:
                    yield dispatched.popleft()
        except Exception as failed:
            error = failed
        yield from dispatched
        if error is not None:
            raise error

    def _dispatch(self, task: BatchTask) -> _Dispatched:
        """Start the computation and the copies of a batch, without waiting for them."""
        batch = gather(task.batch)
        mask = read_mask(batch, self._keep)
        result = self._program(task.batch, mask)
        start_small_copies((result.statistics, result.ran))
        self._check_arrays(task, result.sites, self._manifest.sites)
        kept = None if mask is None else np.flatnonzero(spread_mask(mask, result.row_sizes, np))
        is_transposed = self._program.layout.is_transposed
        columns = make_columns(
            batch, task.number, result.row_sizes, self._beside, is_transposed=is_transposed
        )
        names = list(result.arrays)
        arrays = [result.arrays[name] for name in names]
        rows = math.prod(result.row_sizes)
        kept = self._processes.choose_rows(rows, kept)
        copies = self._processes.start_copies(arrays, rows, kept)
        if kept is not None:
            columns = {name: x[kept] for name, x in columns.items()}
        return _Dispatched(task, dict(zip(names, copies, strict=True)), columns, result)

    def _collect(self, batch: _Dispatched, writers: ShardWriters) -> None:
        """Wait for the rows of a batch; if its unit is finished, start to write the unit."""
        task, result = batch.task, batch.result
        with self._meter.waiting_for("device"):
            small = jax.device_get(gather((result.statistics, result.ran)))
        statistics, ran = small
        for name, did_run in ran.items():
            if not did_run:
                raise SiteError(
                    f"The site {name!r} is in a branch or a loop that batch {task.number} did not "
                    "run, so there is no value to store. Mark a value outside of it, or leave the "
                    "site out of the selection."
                )
        with self._meter.waiting_for("transfer"):
            for copy in batch.copies.values():
                copy.wait()
        self._check_columns(task, batch.columns)
        found = {name: Statistics.measured(parts) for name, parts in statistics.items()}
        self._warn_of_bad_rows(task, found)
        found = {name: self._processes.own_statistics(x) for name, x in found.items()}
        shard = self._manifest.unit_plan.shard(task.unit, self._processes.index)
        # The last unit stays unfinished if another worker finished it first.
        if self._unit is None or self._unit.unit != shard:
            self._unit = _UnitRows(shard, self._names)
        self._unit.add({**batch.copies, **batch.columns}, found)
        self._meter.batches += 1
        self._meter.rows += len(batch.columns["batch"])
        if task.ends_unit:
            with self._meter.waiting_for("disk"):
                writers.submit(self._write, self._unit)
            self._unit = None

    def _write(self, unit: _UnitRows) -> None:
        path = self._folder.shard_path(unit.unit)
        if path.exists():  # another worker did this unit too, and was faster
            return
        try:
            nbytes = write_shard(
                path,
                configuration=self._hash,
                unit=unit.unit,
                chunks=unit.take_chunks(),
                statistics=unit.statistics,
                owner=self._owner,
            )
        except OSError as error:
            raise self._folder.unwritable(error) from error
        self._meter.add_unit(nbytes)
        self._free_memory.add(nbytes)

    def _warn_of_bad_rows(self, task: BatchTask, found: dict[str, Statistics]) -> None:
        """Warn of the first batch in which a site has non-finite rows, or numbers that overflow."""
        for fault, sentence in (("nonfinite", _NOT_FINITE), ("overflowed", _OVERFLOWED)):
            counts = {name: getattr(x, fault) for name, x in found.items()}
            new = [n for n, bad in counts.items() if bad and f"{fault} {n}" not in self._warned]
            if new:
                self._warned.update(f"{fault} {name}" for name in new)
                listed = ", ".join(f"{name!r} ({counts[name]} rows)" for name in new)
                warn_user(f"In batch {task.number}, {sentence}: {listed}.")

    def _check_columns(self, task: BatchTask, columns: dict[str, np.ndarray]) -> None:
        found = [
            RowSite(name, "column", x.dtype.name, x.dtype.name, x.shape[1:], "")
            for name, x in columns.items()
        ]
        self._check_arrays(task, found, self._manifest.columns)

    def _check_arrays(
        self, task: BatchTask, found: Sequence[RowSite], expected: Sequence[DatasetArray]
    ) -> None:
        """Raise if a batch has other arrays than the first batch."""
        here = {x.name: f"{x.dtype}{list(x.shape)}" for x in found}
        first = {x.name: f"{x.dtype}{list(x.shape)}" for x in expected}
        for name in {**first, **here}:
            before, now = first.get(name, "nothing"), here.get(name, "nothing")
            if before != now:
                raise SiteError(
                    f"Every batch must give the same arrays, but in batch {task.number} a row of "
                    f"{name!r} is {now}, and in the first it is {before}."
                )
