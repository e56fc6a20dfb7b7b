"""The program of each of several processes that harvest one sharded model, and may be killed.

`python -m tests.models.harvested_together PROCESS COUNT PORT FOLDER UNITS`
"""

import functools
import os
import sys
import time
import traceback
from pathlib import Path

import jax
from jax.sharding import AxisType

import tapax
from tests.models import harvested
from tests.models.harvesting_processes import network, params_of, spread

HEARTBEAT = 15
"""The seconds after which JAX gives up a process of which it has heard nothing."""


class SlowSpanningBatches:
    """Batches divided over all processes, which take some time to read."""

    def __init__(self, mesh, count):
        self._mesh = mesh
        self._batches = harvested.make_batches(count + 1, (4, 4))[:-1]

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, number):
        time.sleep(0.01)
        return {"tokens": spread(self._batches[number], self._mesh, "data")}


def main(process, count, port, folder, units):
    # A collective may wait for a killed process until JAX misses the heartbeats of that process.
    jax.distributed.initialize(
        f"localhost:{port}", count, process, heartbeat_timeout_seconds=HEARTBEAT
    )
    shape = (2, jax.device_count() // 2)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = {"table": (None, "model"), "weights": ("model", None)}
    params = {name: spread(x, mesh, *spec[name]) for name, x in params_of().items()}
    forward = functools.partial(jax.jit(network), params)
    batches = SlowSpanningBatches(mesh, 2 * units)
    acts = tapax.harvest(forward, batches, folder, "net/*", units=units)
    assert acts.is_complete
    print("done")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the other processes, which may wait for this one
