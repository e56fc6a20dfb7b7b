"""Arrays that span several processes, each of which can read only some of the shards."""

import jax
import numpy as np
from jax.core import Tracer

from tapax._jax.types import PyTree, Value


def spans_processes(x: Value) -> bool:
    """Return whether this process can read only a part of an array."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return False
    return not x.is_fully_addressable and not (x.is_fully_replicated and x.addressable_shards)


def local_elements(x: Value) -> np.ndarray:
    """Return the elements of an array that this process can read, each once, in one dimension."""
    shards = {str(shard.index): np.ravel(shard.data) for shard in x.addressable_shards}
    return np.concatenate([np.zeros(0, x.dtype), *shards.values()])


def gather(tree: PyTree) -> PyTree:
    """Copy arrays that span processes to every process. All processes must call this function."""
    if jax.process_count() == 1:
        return tree
    from jax.experimental.multihost_utils import process_allgather

    return jax.tree.map(
        lambda x: process_allgather(x, tiled=True) if spans_processes(x) else x, tree
    )
