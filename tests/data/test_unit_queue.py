"""Workers share units through the real queue, with a simulated clock and storage.

A thousand workers of uneven speed harvest into storage that shows each shard some time after its
write, to each worker at a different time. Every hour the test kills one worker in twenty, which
loses its current unit.
"""

import dataclasses
import heapq

import numpy as np
import pytest

from tapax.data._unit_queue import UnitQueue
from tapax.data._units import UnitPlan, Worker

HOUR = 3600.0


@dataclasses.dataclass
class Fleet:
    """The record of the workers and units of a simulated harvest, in seconds."""

    finished: np.ndarray  # the time when each unit was first done
    shards: np.ndarray  # the number of writes of each unit
    capacity: list[tuple[float, float, float]]  # start, end and speed of each worker
    lookups: int = 0
    listings: int = 0

    @property
    def makespan(self):
        return self.finished.max()

    @property
    def ideal(self):
        """Return the end time if the running workers divided the work without loss."""
        low, high = 0.0, self.makespan
        for _ in range(60):
            middle = (low + high) / 2
            done = sum(
                speed * max(min(stop, middle) - start, 0) for start, stop, speed in self.capacity
            )
            low, high = (low, middle) if done >= len(self.finished) else (middle, high)
        return high


class DelayedStorage:
    """The folder as one worker sees it, with shards that appear `delay` seconds late."""

    def __init__(self, fleet, clock, delay):
        self._fleet, self._clock, self._delay = fleet, clock, delay

    def units_done(self):
        self._fleet.listings += 1
        return np.flatnonzero(self._fleet.finished + self._delay <= self._clock[0])

    def is_done(self, unit):
        self._fleet.lookups += 1
        return self._fleet.finished[unit] + self._delay <= self._clock[0]


def simulate(workers, units_each, *, unit_seconds, delay, kills, restart, seed=0):
    """Run a fleet; `kills` is the share of workers killed each hour.

    `restart` is the time until a replacement starts, or None for no replacement.
    """
    rng = np.random.default_rng(seed)
    plan = UnitPlan(workers * units_each, 1)
    fleet = Fleet(np.full(plan.count, np.inf), np.zeros(plan.count, int), [])
    speeds = rng.uniform(0.4, 1.6, workers) / unit_seconds  # units per second
    clock = [0.0]
    events = []  # time, worker, its life, the unit finished at that time

    def start(worker, life):
        storage = DelayedStorage(fleet, clock, rng.uniform(0, delay))
        queue = iter(UnitQueue(plan, Worker(worker, workers), storage))
        killed = clock[0] + (rng.exponential(HOUR / kills) if kills else np.inf)
        begin(worker, life, queue, killed, clock[0])

    def begin(worker, life, queue, killed, born):
        unit = next(queue, None)
        ends = clock[0] if unit is None else clock[0] + 1 / speeds[worker]
        if unit is None or ends > killed:
            fleet.capacity.append((born, min(ends, killed), speeds[worker]))
            if unit is not None and restart is not None:
                heapq.heappush(events, (killed + restart, worker, life + 1, None, None, 0, 0))
            return
        heapq.heappush(events, (ends, worker, life, unit, queue, killed, born))

    for worker in range(workers):
        start(worker, 0)
    while events:
        clock[0], worker, life, unit, queue, killed, born = heapq.heappop(events)
        if queue is None:
            start(worker, life)
            continue
        fleet.finished[unit] = min(fleet.finished[unit], clock[0])
        fleet.shards[unit] += 1
        begin(worker, life, queue, killed, born)
    return fleet


@pytest.mark.many
@pytest.mark.parametrize("restart", [300.0, None], ids=["replaced", "lost"])
def test_a_thousand_uneven_workers_lose_a_tenth_at_most(restart):
    fleet = simulate(1000, 100, unit_seconds=120.0, delay=60.0, kills=0.05, restart=restart)
    assert np.isfinite(fleet.finished).all()
    assert fleet.ideal <= fleet.makespan <= 1.1 * fleet.ideal
    assert fleet.shards.min() == 1 and fleet.shards.mean() < 1.1
    # Requests to the storage: one or two lookups per unit, and a few listings per worker.
    assert fleet.lookups < 3 * len(fleet.finished)
    assert fleet.listings < 40 * 1000


@pytest.mark.many
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("restart", [300.0, None], ids=["replaced", "lost"])
def test_fleets_of_other_sizes_lose_a_tenth_at_most(restart, seed):
    sizes = np.random.default_rng(seed)
    workers, each = int(sizes.integers(2, 800)), int(sizes.integers(80, 200))
    seconds, delay = sizes.uniform(30, 300), sizes.uniform(0, 60)
    fleet = simulate(
        workers, each, unit_seconds=seconds, delay=delay, kills=0.05, restart=restart, seed=seed
    )
    assert np.isfinite(fleet.finished).all()
    assert fleet.makespan <= 1.1 * fleet.ideal


def test_shares_that_nobody_takes_over_wait_for_the_slowest():
    """A fixed division of the units does not reach the bound of the test above."""
    speeds = np.random.default_rng(0).uniform(0.4, 1.6, 1000)
    assert (1 / speeds).max() * speeds.mean() > 2


class Listed:
    """A storage with settable contents."""

    def __init__(self, listed, done=()):
        self.listed, self.done = listed, {*listed, *done}

    def units_done(self):
        return self.listed

    def is_done(self, unit):
        return unit in self.done


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_every_worker_alone_would_do_every_unit_once(count):
    plan = UnitPlan(12, 1)
    for index in range(count):
        units = list(UnitQueue(plan, Worker(index, count), Listed([4, 7], done=[9])))
        assert sorted(units) == [0, 1, 2, 3, 5, 6, 8, 10, 11]
        own = [unit for unit in range(index, 12, count) if unit not in (4, 7, 9)]
        assert units[: len(own)] == own


def test_shares_without_taking_over_are_every_unit_once():
    for count in (1, 2, 5):
        queues = [
            UnitQueue(UnitPlan(12, 1), Worker(index, count), Listed([]), take_over=False)
            for index in range(count)
        ]
        assert sorted(unit for queue in queues for unit in queue) == list(range(12))


def test_workers_take_units_of_others_in_different_orders():
    plan, storage = UnitPlan(64, 1), Listed(range(60, 64))
    orders = [list(UnitQueue(plan, Worker(60 + i, 64), storage)) for i in range(4)]
    assert len({order[0] for order in orders}) > 1
    assert len({tuple(order) for order in orders}) == 4


def test_units_with_a_shard_for_each_process_are_done_when_all_are_there():
    plan = UnitPlan(batches=4, batches_per_unit=1, parts=3)
    assert (plan.count, plan.shard_count, list(plan.shards(2))) == (4, 12, [6, 7, 8])
    assert plan.units_done([0, 1, 2, 3, 4, 9, 10, 11]).tolist() == [0, 3]
