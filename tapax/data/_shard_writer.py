"""Write shards: the rows of a unit of work, and their statistics, in one safetensors file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tapax.data._atomic_files import write_whole
from tapax.data._shard_format import (
    ShardHeader,
    as_bytes,
    block_checksums,
    encode_header,
    place_arrays,
    row_key,
    statistic_key,
)
from tapax.data._statistics import Statistics

Chunks = Mapping[str, Sequence[np.ndarray]]
"""The rows of each site and column, in consecutive pieces."""


def write_shard(
    path: Path,
    *,
    configuration: str,
    unit: int,
    chunks: Chunks,
    statistics: Mapping[str, Statistics],
    owner: str,
) -> int:
    """Write the shard of a unit atomically, and return its size in bytes.

    `configuration` is the hash of the manifest.
    """
    pieces = {row_key(name): parts for name, parts in chunks.items()}
    for name, found in statistics.items():
        for part in ("mean", "squares"):
            pieces[statistic_key(name, part)] = [getattr(found, part)]
    views = {key: [as_bytes(part) for part in parts] for key, parts in pieces.items()}
    placed = place_arrays(
        {
            key: (parts[0].dtype.name, _joined_shape(parts), block_checksums(views[key]))
            for key, parts in pieces.items()
        }
    )
    header = ShardHeader(
        configuration,
        unit,
        sum(len(part) for part in next(iter(chunks.values()))),
        placed,
        {name: found.numbers for name, found in statistics.items()},
    )
    beginning = encode_header(header)
    write_whole(path, [beginning, *(view for key in placed for view in views[key])], owner)
    return len(beginning) + sum(len(view) for key in placed for view in views[key])


def _joined_shape(parts: Sequence[np.ndarray]) -> tuple[int, ...]:
    first = parts[0].shape
    return (sum(part.shape[0] for part in parts), *first[1:]) if len(parts) > 1 else first
