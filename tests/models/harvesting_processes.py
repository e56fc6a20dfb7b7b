"""The program of each of several processes: harvests with one sharded model, and as workers.

`python -m tests.models.harvesting_processes PROCESS COUNT PORT FOLDER`
"""

import functools
import os
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tapax
from tests.models import harvested


def network(params, batch):
    """Run the model of `tests.models.harvested` with its weights as arguments."""
    x = tapax.sow(params["table"][batch["tokens"]], "net/embed")
    return tapax.sow(jnp.maximum(x @ params["weights"], 0), "net/hidden")


def spread(x, mesh, *spec):
    """Make an array of which every process holds the shards of its devices."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


class SpanningBatches:
    """Batches that are made when they are read, divided over all processes."""

    def __init__(self, mesh):
        self._mesh = mesh
        self._batches = harvested.make_batches(6, (4, 4))[:-1]

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, number):
        return {"tokens": spread(self._batches[number], self._mesh, "data")}


def harvest_sharded(mesh, folder):
    """Harvest with weights and batches sharded over the processes."""
    params = {
        "table": spread(harvested.TABLE, mesh, None, "model"),
        "weights": spread(harvested.WEIGHTS, mesh, "model", None),
    }
    forward = functools.partial(jax.jit(network), params)
    batches = SpanningBatches(mesh)

    def harvest(to, **options):
        return tapax.harvest(forward, batches, to, "net/*", units=3, **options)

    acts = harvest(folder / "sharded")
    assert acts.is_complete and len(acts) == 5 * 16
    kept = harvest(folder / "kept", keep=lambda batch: batch["tokens"] % 2 == 0)
    assert kept.is_complete
    check_resuming(harvest, folder / "sharded", mesh)
    local = [
        {"tokens": x} for x in harvested.make_batches(4, (3, 3))
    ]  # 4 devices do not divide them
    replicated = {name: spread(np.asarray(x), mesh) for name, x in params_of().items()}
    tapax.harvest(functools.partial(network, replicated), local, folder / "replicated", units=2)
    order = np.arange(mesh.size).reshape(-1, 2).T.ravel()  # separates the devices of a process
    apart = jax.sharding.Mesh(mesh.devices.ravel()[order], ("all",))
    lying_apart = {name: spread(np.asarray(x), apart) for name, x in params_of().items()}
    tapax.harvest(functools.partial(network, lying_apart), local, folder / "apart", units=2)
    stream = (batch for batch in local)
    tapax.harvest(functools.partial(network, replicated), stream, folder / "stream")


def params_of():
    return {"table": harvested.TABLE, "weights": harvested.WEIGHTS}


def check_resuming(harvest, folder, mesh):
    """Check that all processes redo a unit with a missing shard."""
    before = harvested.read_files(folder)
    lost = sorted((folder / "shards").glob("*.safetensors"))[-1]
    np.asarray(jax.jit(jnp.sum)(spread(np.ones(mesh.size), mesh, ("data", "model"))))
    if mesh.devices.flat[0] in jax.local_devices():
        lost.unlink()
        (folder / "index.json").unlink()
    assert harvest(folder).is_complete
    assert harvested.read_files(folder) == before


def main(process, count, port, folder):
    jax.distributed.initialize(f"localhost:{port}", count, process)
    devices = jax.device_count()
    assert jax.process_count() == count
    mesh = jax.make_mesh((2, devices // 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    harvest_sharded(mesh, folder)
    acts = harvested.harvest(folder / "workers", worker=None)
    assert acts.is_complete
    print("done")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the other processes, which may wait for this one
