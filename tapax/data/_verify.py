"""Check a dataset: compare every byte of every shard with the checksums."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tapax.data._folder import DatasetFolder
from tapax.data._manifest import Manifest
from tapax.data._mapped_shard import MappedShard
from tapax.data._shard_format import ShardError, row_key, statistic_key


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of a check of a dataset, which prints as a report.

    Attributes:
        path: The folder of the dataset.
        shards: The number of shards that were read.
        nbytes: The size of the shards, in bytes.
        faults: A sentence for each shard that is missing, truncated or altered.
        is_complete: True if the harvest has finished. Otherwise only the shards that it has
            written so far were read.

    Example:
        >>> import tempfile, jax.numpy as jnp, tapax
        >>> double = lambda x: tapax.sow(2 * x, "h")
        >>> acts = tapax.harvest(double, [jnp.ones((8, 3))], to=tempfile.mkdtemp())
        >>> found = acts.verify()
        >>> found.is_whole, found.shards, found.faults, found.is_complete
        (True, 1, (), True)
    """

    path: str
    shards: int
    nbytes: int
    faults: tuple[str, ...]
    is_complete: bool

    @property
    def is_whole(self) -> bool:
        """True if no shard has a fault."""
        return not self.faults

    def __str__(self) -> str:
        checked = f"{self.shards} shards of {self.path!r} were read, {self.nbytes:,} bytes"
        found = f"{len(self.faults)} faults" if self.faults else "every checksum is right"
        lines = [f"{checked}: {found}.", *self.faults]
        if not self.is_complete:
            lines.append("The harvest is not finished, so there are units without a shard.")
        return "\n".join(lines)


def verify_dataset(path: str | os.PathLike[str]) -> Verification:
    """Read a whole dataset and compare it with its checksums and its manifest."""
    folder = DatasetFolder(path)
    manifest = Manifest.read(folder.path)
    count = manifest.unit_plan.shard_count
    counts, done = folder.read_index(count), folder.units_done()
    expected = range(len(counts)) if counts is not None else done
    missing = [folder.shard_path(unit) for unit in expected if unit not in done]
    faults = [f"The shard {str(path)!r} is missing." for path in missing]
    check = functools.partial(_check_shard, folder, manifest, counts)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        results = list(threads.map(check, sorted(done)))
    faults += [fault for fault, _ in results if fault]
    nbytes = sum(nbytes for _, nbytes in results)
    return Verification(str(path), len(done), nbytes, tuple(faults), counts is not None)


def _check_shard(
    folder: DatasetFolder, manifest: Manifest, counts: list[int] | None, unit: int
) -> tuple[str, int]:
    """Return the fault of a shard, or an empty string, and the size of the shard in bytes."""
    path = folder.shard_path(unit)
    try:
        shard = MappedShard(path, manifest.hash)
        wrong = next(_differences(shard, manifest, unit, counts), "")
        if wrong:
            raise ShardError(f"The shard {str(path)!r} {wrong}.")
        for key in shard.header.arrays:
            shard.array(key)
    except (ShardError, OSError) as error:
        return str(error), path.stat().st_size if path.exists() else 0
    return "", shard.header.nbytes


def _differences(
    shard: MappedShard, manifest: Manifest, unit: int, counts: list[int] | None
) -> Iterator[str]:
    header = shard.header
    if header.unit != unit:
        yield f"contains unit {header.unit} instead of the unit of its name"
    if counts is not None and (unit >= len(counts) or counts[unit] != header.rows):
        yield f"has {header.rows} rows, but the index of the dataset does not say so"
    for array in manifest.arrays:
        found = header.arrays.get(row_key(array.name))
        if found is None or (found.dtype, found.shape) != (
            array.dtype,
            (header.rows, *array.shape),
        ):
            yield f"does not hold {array.name!r} as the manifest describes it"
    wanted = {row_key(array.name) for array in manifest.arrays} | set(_statistic_keys(manifest))
    for key in header.arrays.keys() ^ wanted:
        yield f"has {key!r} too" if key in header.arrays else f"lacks {key!r}"


def _statistic_keys(manifest: Manifest) -> Iterable[str]:
    return (statistic_key(x.name, part) for x in manifest.sites for part in ("mean", "squares"))
