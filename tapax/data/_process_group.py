"""The processes that run one program: a single one, or several that its arrays span.

Several processes of `jax.distributed` act together: all of them call `harvest` with equal arguments
and dispatch equal batches. Whatever the sharding of a value is, its rows are divided over all
devices, so that every process copies and writes an equal part of the rows, and each row is written
once. A unit has one shard for each process. The shard of the first process has the statistics of
all rows.

The devices that a process can address identify the process. `jax.process_index()` does not: it is
not always unique.
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
    """The number of processes."""
    index = 0
    """The place of this process among all."""

    def agree_on_units(self, units: Iterable[int]) -> Iterable[int]:
        """Iterate over the units that the first process takes from its queue."""
        return units

    def wait(self) -> None:
        """Wait until all processes are here."""

    def choose_rows(self, rows: int, kept: np.ndarray | None) -> np.ndarray | None:
        """Choose the rows that this process stores, among the rows in `kept`; None for all."""
        return kept

    def start_copies(
        self, arrays: Sequence[Value], rows: int, chosen: np.ndarray | None
    ) -> Sequence[PendingCopy | PendingRows]:
        """Start to copy the `chosen` rows to the host."""
        if not all(x.is_fully_addressable for x in arrays):
            raise ValueError(
                "The values of the function span processes, but none of its inputs does, so "
                "`harvest` cannot tell which processes take part. Put the batches or the weights "
                "on the mesh, with a jax.sharding.NamedSharding."
            )
        return start_copies(arrays, chosen)

    def own_statistics(self, found: Statistics) -> Statistics:
        """Return the statistics that this process stores."""
        return found


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes that run a sharded program; `sharding` divides rows over their devices."""

    sharding: NamedSharding

    @functools.cached_property
    def _devices(self) -> list[Any]:
        return np.asarray(self.sharding.mesh.devices).ravel().tolist()

    @functools.cached_property
    def _local(self) -> list[int]:
        """The places of the devices of this process among all devices."""
        addressable = self.sharding.addressable_devices
        return [place for place, device in enumerate(self._devices) if device in addressable]

    @functools.cached_property
    def _processes(self) -> list[int]:
        return list(dict.fromkeys(device.process_index for device in self._devices))

    @property
    def count(self) -> int:
        """The number of processes."""
        return len(self._processes)

    @functools.cached_property
    def index(self) -> int:
        """The place of this process among all."""
        return self._processes.index(self._devices[self._local[0]].process_index)

    def agree(self, number: int) -> int:
        """Return the `number` of the first process. All processes must call this."""

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
        """Return the numbers of the rows that devices of this process have, among `rows` rows."""
        block = -(-rows // len(self._devices))
        starts = np.array(self._local, np.int64) * block
        numbers = (starts[:, None] + np.arange(block)).reshape(-1)
        return numbers[numbers < rows]

    def choose_rows(self, rows: int, kept: np.ndarray | None) -> np.ndarray:
        """Choose the rows that this process stores: the rows in `kept` that are on its devices."""
        here = self.row_numbers(rows)
        return here if kept is None else np.intersect1d(here, kept, assume_unique=True)

    def start_copies(
        self, arrays: Sequence[Value], rows: int, chosen: np.ndarray | None
    ) -> Sequence[PendingCopy | PendingRows]:
        """Divide arrays over the devices, and start to copy the `chosen` rows to the host.

        The `chosen` rows are on devices of this process.
        """
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
        """Return `found` in the first process, and the statistics of no rows in the others."""
        return found if self.index == 0 else found.emptied()


class PendingRows:
    """A copy to the host of the rows of a divided array that are on devices of this process."""

    def __init__(self, x: Value, places: np.ndarray):
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        self._copies = [PendingCopy(shard.data, None) for shard in shards]
        self._places = places

    def wait(self) -> None:
        """Wait until the rows are on the host, as far as JAX can wait for a copy."""
        for copy in self._copies:
            copy.wait()

    def rows(self) -> np.ndarray:
        """Return the chosen rows."""
        return np.concatenate([copy.rows() for copy in self._copies])[self._places]


Processes = OneProcess | ProcessGroup


def find_processes(inputs: Iterable[Any]) -> Processes:
    """Find the processes that the inputs of a program span."""
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
