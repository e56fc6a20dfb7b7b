"""Harvests on Ray: actors write shards, on one machine or on a cluster with shared storage.

    acts = tapax.data.ray.harvest(make_fn, batches, to="acts", num_workers=8, num_gpus=1)

Each actor is a worker of `tapax.harvest`. Rows never pass through Ray: the actors write the rows
and return their number. This module needs `pip install 'tapax[ray]'`.
"""

from tapax.data.ray._actor_harvest import harvest

__all__ = ["harvest"]
