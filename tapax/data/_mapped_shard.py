"""Memory-mapped shards, which check their bytes before they return them.

Every block of an array has a checksum, which is compared when a row of the block is first read. So
a shard that was altered raises instead of returning wrong rows, and each byte is checked once.
"""

from __future__ import annotations

import functools
import mmap
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tapax.data._block_checks import BlockChecks
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
        self._views: dict[str, np.ndarray] = {}
        self._checks = {
            key: BlockChecks(len(found.checksums)) for key, found in self.header.arrays.items()
        }

    @property
    def rows(self) -> int:
        return self.header.rows

    def array(self, key: str) -> np.ndarray:
        """Check all of an array, and return a view of it."""
        self._check(key, np.arange(len(self.header.arrays[key].checksums)))
        return self._view(key)

    def slice(self, key: str, start: int, stop: int) -> np.ndarray:
        """Return a view of the rows from `start` to `stop` of an array."""
        view = self._view(key)
        width = view.nbytes // max(len(view), 1)
        if stop > start and width:
            blocks = np.arange(start * width // BLOCK, (stop * width - 1) // BLOCK + 1)
            self._check(key, blocks)
        return view[start:stop]

    def take(self, key: str, numbers: np.ndarray, out: np.ndarray) -> None:
        """Copy the rows with the given `numbers`, which ascend, to `out`."""
        view = self._view(key)
        width = view.nbytes // max(len(view), 1)
        if width and not self._checks[key].is_complete:
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
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._make_view(key)
        return view

    def _make_view(self, key: str) -> np.ndarray:
        found = self.header.arrays[key]
        start = self.header.data_start + found.start
        data = self._mapped[start : start + found.nbytes]
        return np.asarray(data).view(dtype_of(found.dtype)).reshape(found.shape)

    def _check(self, key: str, blocks: np.ndarray) -> None:
        """Compare blocks with their checksums, except blocks that were compared before."""
        self._checks[key].require(blocks, functools.partial(self._check_block, key))

    def _check_block(self, key: str, block: int) -> None:
        """Compare a block with its checksum."""
        found = self.header.arrays[key]
        start = self.header.data_start + found.start
        first = start + block * BLOCK
        last = min(first + BLOCK, start + found.nbytes)
        if zlib.crc32(memoryview(self._mapped)[first:last]) != found.checksums[block]:
            raise ShardError(
                f"The shard {str(self.path)!r} was altered: its bytes {first} to {last}, which "
                f"belong to {key!r}, do not have the checksum that was stored with them. Remove "
                "the shard, and call `harvest` again as before: it computes that unit anew."
            )
