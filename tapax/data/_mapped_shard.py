"""Memory-mapped shards, which check their bytes before they return them.

Every block of an array has a checksum, which is compared when a row of the block is first read. So
a shard that was altered raises instead of returning wrong rows, and each byte is checked once.
"""

from __future__ import annotations

import mmap
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tapax.data._shard_format import BLOCK, ShardError, ShardHeader, decode_header, dtype_of


class MappedShard:
    """A shard that reads its arrays from the file when they are used."""

    def __init__(self, path: Path, configuration: str):
        self.path = path
        try:
            self._mapped: Any = np.memmap(path, np.uint8, "r")
        except FileNotFoundError:
            raise ShardError(f"The shard {str(path)!r} is missing.") from None
        except ValueError:  # an empty file cannot be mapped
            raise ShardError(f"The shard {str(path)!r} is empty.") from None
        length = 8 + int.from_bytes(self._mapped[:8].tobytes(), "little")
        beginning = self._mapped[: min(length, len(self._mapped))].tobytes()
        self.header: ShardHeader = decode_header(beginning, len(self._mapped), str(path))
        if self.header.configuration != configuration:
            raise ShardError(f"The shard {str(path)!r} belongs to another dataset.")
        self._checked: dict[str, np.ndarray] = {}

    @property
    def rows(self) -> int:
        return self.header.rows

    def array(self, key: str) -> np.ndarray:
        """Check all of an array, and return a view of it."""
        found = self.header.arrays[key]
        self._check(key, np.arange(len(found.checksums)))
        return self._view(key)

    def slice(self, key: str, start: int, stop: int) -> np.ndarray:
        """Return a view of the rows from `start` to `stop` of an array."""
        view = self._view(key)
        width = view.nbytes // max(len(view), 1)
        if stop > start and width:
            self._check(key, np.arange(start * width // BLOCK, (stop * width - 1) // BLOCK + 1))
        return view[start:stop]

    def take(self, key: str, numbers: np.ndarray, out: np.ndarray) -> None:
        """Copy the rows with the given `numbers`, which ascend, to `out`."""
        view = self._view(key)
        width = view.nbytes // max(len(view), 1)
        if width and not self._blocks_checked(key).all():
            first, last = numbers * width // BLOCK, (numbers * width + width - 1) // BLOCK
            steps = range(int((last - first).max(initial=0)) + 1)
            spanned = np.concatenate([np.minimum(first + step, last) for step in steps])
            self._check(key, np.unique(spanned))
        # Copy bytes, because NumPy copies bfloat16 and float8 element by element.
        rows = view.reshape(len(view), -1).view(np.uint8)
        np.take(rows, numbers, 0, out.reshape(len(out), -1).view(np.uint8), mode="clip")

    def release_pages(self) -> None:
        """Release the memory of the pages that were read; the file stays mapped."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapped._mmap.madvise(mmap.MADV_DONTNEED)

    def _view(self, key: str) -> np.ndarray:
        found = self.header.arrays[key]
        start = self.header.data_start + found.start
        data = self._mapped[start : start + found.nbytes]
        return np.asarray(data).view(dtype_of(found.dtype)).reshape(found.shape)

    def _blocks_checked(self, key: str) -> np.ndarray:
        count = len(self.header.arrays[key].checksums)
        return self._checked.setdefault(key, np.zeros(count, bool))

    def _check(self, key: str, blocks: np.ndarray) -> None:
        """Compare blocks with their checksums, except blocks that were compared before."""
        found, checked = self.header.arrays[key], self._blocks_checked(key)
        start = self.header.data_start + found.start
        for block in blocks[~checked[blocks]].tolist():
            first = start + block * BLOCK
            last = min(first + BLOCK, start + found.nbytes)
            if zlib.crc32(memoryview(self._mapped)[first:last]) != found.checksums[block]:
                raise ShardError(
                    f"The shard {str(self.path)!r} was altered: its bytes {first} to {last}, which "
                    f"belong to {key!r}, do not have the checksum that was stored with them. "
                    "Remove the shard, and call `harvest` again as before: it computes that unit "
                    "anew."
                )
            checked[block] = True
