"""The choice of a worker for this process, and of the units in a folder that it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from tapax.data._folder import DatasetFolder, WorkerTakenError
from tapax.data._meter import Meter
from tapax.data._process_group import Processes
from tapax.data._unit_queue import UnitQueue
from tapax.data._units import UnitPlan, Worker


class FolderUnits:
    """A record of the units of a plan that are done, read from the shards in a folder."""

    def __init__(self, folder: DatasetFolder, plan: UnitPlan):
        self._folder, self.plan = folder, plan

    def units_done(self) -> np.ndarray:
        return self.plan.units_done(self._folder.units_done())

    def is_done(self, unit: int) -> bool:
        return all(self._folder.has_shard(shard) for shard in self.plan.shards(unit))


def worker_choices(processes: Processes) -> list[Worker]:
    """List the workers that this process may be if the user does not say, the likeliest first.

    The number of a process is not always unique: under Pathways it is 0 in every process. A process
    that finds a worker locked becomes the next one.
    """
    count = jax.process_count() if processes.count == 1 else 1
    return [Worker((jax.process_index() + i) % count, count) for i in range(count)]


def lock_worker(
    folder: DatasetFolder,
    workers: Sequence[Worker],
    processes: Processes,
    stack: contextlib.ExitStack,
) -> tuple[Worker, str]:
    """Lock the first free worker until `stack` is closed.

    Return the worker and the name under which it writes.
    """
    process = processes.index if processes.count > 1 else None
    for worker in workers[:-1]:
        with contextlib.suppress(WorkerTakenError):
            return worker, stack.enter_context(folder.lock(worker, process))
    return workers[-1], stack.enter_context(folder.lock(workers[-1], process))


def choose_units(
    storage: FolderUnits, worker: Worker, processes: Processes, *, take_over: bool, meter: Meter
) -> Iterable[int] | None:
    """Return the units to do, each chosen at its turn, or None if their number is unknown.

    Set `meter.expected` to the number of batches in the share of the worker.
    """
    plan = storage.plan
    if plan.count is None:
        return None
    done = set(storage.units_done().tolist())
    assigned = plan.units()[worker.index :: worker.count]
    meter.expected = sum(len(plan.batch_numbers(unit)) for unit in assigned if unit not in done)
    return processes.agree_on_units(UnitQueue(plan, worker, storage, take_over=take_over))
