"""Write shards: the rows of a unit of work, and their statistics, in one safetensors file.

One pass over the rows computes checksums and writes. The header, which contains the checksums,
is written last, into the room that was left for it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tapax.data._atomic_files import replacing, write_all
from tapax.data._shard_format import (
    ShardHeader,
    StoredArray,
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

_PIECE = 1 << 22
"""The number of bytes to write at once; file systems take longer for smaller pieces."""


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
    placed = place_arrays(
        {key: (parts[0].dtype.name, _joined_shape(parts)) for key, parts in pieces.items()}
    )
    header = ShardHeader(
        configuration,
        unit,
        sum(len(part) for part in next(iter(chunks.values()))),
        placed,
        {name: _as_json(found.numbers) for name, found in statistics.items()},
    )
    # Checksums have a fixed number of digits, so the length of the header is known before them.
    start = len(encode_header(header))
    checked: dict[str, StoredArray] = {}
    with replacing(path, owner) as file:
        file.seek(start)
        for key, array in placed.items():
            checksums = block_checksums(_cut(pieces[key]), lambda part: write_all(file, part))
            checked[key] = dataclasses.replace(array, checksums=checksums)
        file.seek(0)
        beginning = encode_header(dataclasses.replace(header, arrays=checked))
        assert len(beginning) == start
        write_all(file, beginning)
    return dataclasses.replace(header, data_start=start).nbytes


def _as_json(numbers: Mapping[str, int | float]) -> dict[str, int | float | str]:
    """Write numbers that JSON lacks as strings: the sum of norms may be too large for 64 bits."""
    return {name: x if math.isfinite(x) else str(x) for name, x in numbers.items()}


def _cut(parts: Sequence[np.ndarray]) -> Iterator[memoryview]:
    """Iterate over the bytes of arrays, in pieces that fit in the processor's cache."""
    for part in parts:
        view = as_bytes(part)
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]


def _joined_shape(parts: Sequence[np.ndarray]) -> tuple[int, ...]:
    first = parts[0].shape
    return (sum(part.shape[0] for part in parts), *first[1:]) if len(parts) > 1 else first
