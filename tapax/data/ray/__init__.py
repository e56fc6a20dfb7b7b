"""Harvests on Ray: actors that write shards, on one machine or on a cluster with shared storage.

    acts = tapax.data.ray.harvest(make_fn, batches, to="acts", num_workers=8, num_gpus=1)

An actor is a worker as in `tapax.harvest`. Rows never pass through Ray: actors write them and
return counts. This module needs `pip install 'tapax[ray]'`.
"""

from tapax.data.ray._actor_harvest import harvest

__all__ = ["harvest"]
