"""The processes that run one program: one, or those of `jax.distributed` that its arrays span.

Several processes act together: all of them call `harvest` alike and dispatch the same batches. The
rows of a batch are divided over all devices, whatever the sharding of the value was, so that every
process copies and writes an equal part of them, and each row once. A unit has one shard for each
process. The statistics, which are those of all rows, are in the shard of the first process.

Processes are told apart by the devices that they can address, not by `jax.process_index()`, which
is not always a name of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tapax._jax import Value
from tapax.data._statistics import Statistics
from tapax.data._transfer import PendingCopy, start_copies

_NO_UNIT = -1


class OneProcess:
    """A process that runs its program alone."""

    count = 1
    """How many processes there are."""
    index = 0
    """The place of this process among them."""

    def agree_on_units(self, units: Iterable[int]) -> Iterable[int]:
        """Iterate over the units that the first process takes from its queue."""
        return units

    def wait(self) -> None:
        """Wait until all processes are here."""

    def choose_rows(self, rows: int, kept: np.ndarray | None) -> np.ndarray | None:
        """Return which of the kept rows, or of all, this process stores; None for all."""
        return kept

    def start_copies(
        self, arrays: Sequence[Value], rows: int, chosen: np.ndarray | None
    ) -> Sequence[PendingCopy | PendingRows]:
        """Start to copy the chosen rows to the host."""
        if not all(x.is_fully_addressable for x in arrays):
            raise ValueError(
                "The values of the function span processes, but none of its inputs does, so "
                "`harvest` cannot tell which processes take part. Put the batches or the weights "
                "on the mesh, with a jax.sharding.NamedSharding."
            )
        return start_copies(arrays, chosen)

    def own_statistics(self, found: Statistics) -> Statistics:
        """Return the statistics for this process to store."""
        return found


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes that a sharded program runs on; `sharding` divides rows over their devices."""

    sharding: NamedSharding

    @functools.cached_property
    def _devices(self) -> list[Any]:
        return np.asarray(self.sharding.mesh.devices).ravel().tolist()

    @functools.cached_property
    def _local(self) -> list[int]:
        """The places of this process's devices among all."""
        addressable = self.sharding.addressable_devices
        return [place for place, device in enumerate(self._devices) if device in addressable]

    @functools.cached_property
    def _processes(self) -> list[int]:
        return list(dict.fromkeys(device.process_index for device in self._devices))

    @property
    def count(self) -> int:
        """How many processes there are."""
        return len(self._processes)

    @functools.cached_property
    def index(self) -> int:
        """The place of this process among them."""
        return self._processes.index(self._devices[self._local[0]].process_index)

    def agree(self, number: int) -> int:
        """Return the number that the first process gave. All processes must call this."""

        def part(index: Any) -> np.ndarray:
            is_first = (index[0].start or 0) == 0
            return np.array([number if is_first else 0], np.int32)

        parts = jax.make_array_from_callback((len(self._devices),), self.sharding, part)
        return int(self._sum(parts))

    def agree_on_units(self, units: Iterable[int]) -> Iterator[int]:
        """Iterate over the units that the first process takes from its queue."""
        mine = iter(units)
        while (unit := self.agree(next(mine, _NO_UNIT) if self.index == 0 else 0)) != _NO_UNIT:
            yield unit

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.agree(0)

    def row_numbers(self, rows: int) -> np.ndarray:
        """Return the rows, out of so many, that this process holds once they are divided."""
        block = -(-rows // len(self._devices))
        starts = np.array(self._local, np.int64) * block
        numbers = (starts[:, None] + np.arange(block)).reshape(-1)
        return numbers[numbers < rows]

    def choose_rows(self, rows: int, kept: np.ndarray | None) -> np.ndarray:
        """Return which of the kept rows, or of all, this process stores: those that it holds."""
        here = self.row_numbers(rows)
        return here if kept is None else np.intersect1d(here, kept, assume_unique=True)

    def start_copies(
        self, arrays: Sequence[Value], rows: int, chosen: np.ndarray | None
    ) -> Sequence[PendingCopy | PendingRows]:
        """Divide arrays, and start to copy the chosen rows to the host; this process holds them."""
        here = self.row_numbers(rows)
        places = np.arange(len(here)) if chosen is None else np.searchsorted(here, chosen)
        return [PendingRows(x, places) for x in self._divide(list(arrays))]

    @functools.cached_property
    def _divide(self) -> Any:
        devices = len(self._devices)

        def pad(arrays: list[Value]) -> list[Value]:
            return [jnp.pad(x, [(0, -len(x) % devices), *[(0, 0)] * (x.ndim - 1)]) for x in arrays]

        return jax.jit(pad, out_shardings=self.sharding)

    @functools.cached_property
    def _sum(self) -> Any:
        return jax.jit(jnp.sum, out_shardings=NamedSharding(self.sharding.mesh, PartitionSpec()))

    def own_statistics(self, found: Statistics) -> Statistics:
        """Return the statistics for this process to store: those of no rows, but for the first."""
        return found if self.index == 0 else found.emptied()


class PendingRows:
    """A copy to the host of the rows that this process holds of a divided array."""

    def __init__(self, x: Value, places: np.ndarray):
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        self._copies = [PendingCopy(shard.data, None) for shard in shards]
        self._places = places

    def wait(self) -> None:
        """Wait until the rows are on the host, or as near to it as JAX lets one wait for."""
        for copy in self._copies:
            copy.wait()

    def rows(self) -> np.ndarray:
        """Return the rows that are wanted."""
        return np.concatenate([copy.rows() for copy in self._copies])[self._places]


Processes = OneProcess | ProcessGroup


def find_processes(inputs: Iterable[Any]) -> Processes:
    """Return the processes that the inputs of a program span."""
    for x in inputs:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            mesh = getattr(x.sharding, "mesh", None)
            if not isinstance(mesh, jax.sharding.Mesh):
                raise TypeError(
                    f"An input of the function spans processes by a {type(x.sharding).__name__}. "
                    "`harvest` needs a jax.sharding.NamedSharding there."
                )
            return ProcessGroup(NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    return OneProcess()
