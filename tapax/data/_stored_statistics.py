"""Read the statistics in shards, and merge them."""

from collections.abc import Iterable

from tapax.data._mapped_shard import MappedShard
from tapax.data._shard_format import statistic_key
from tapax.data._statistics import Statistics, merge_all


def read_statistics(name: str, shards: Iterable[MappedShard]) -> Statistics:
    """Merge the statistics of a site over shards, in the given order."""
    return merge_all(
        Statistics.of(
            {
                **shard.header.numbers[name],
                "mean": shard.array(statistic_key(name, "mean")),
                "squares": shard.array(statistic_key(name, "squares")),
            }
        )
        for shard in shards
    )
