"""The folder of a dataset: its manifest, its shards, its index, and the locks of workers.

    acts/
      manifest.json                      the configuration and the arrays
      shards/unit-00000000.safetensors   the rows of each unit of work
      index.json                         the number of rows of each shard, once all units are done

A unit is done once its shard has its final name. Files whose names begin with a dot do not belong
to the dataset.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tapax.data import _manifest
from tapax.data._atomic_files import create_whole, remove_leftovers, write_whole
from tapax.data._manifest import Manifest, check_same
from tapax.data._shard_format import ShardHeader, decode_header
from tapax.data._units import Worker

_SHARD = re.compile(r"unit-(\d{8,})\.safetensors")
_INDEX = "index.json"


class WorkerTakenError(RuntimeError):
    """The error of a worker number under which another process harvests."""


class UnwritableError(OSError):
    """The error of a folder that cannot be written; what is in it stays as it is."""


def is_dataset(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder contains the manifest of a dataset."""
    return (Path(path) / _manifest.NAME).is_file()


class DatasetFolder:
    """The files of a dataset."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)

    @property
    def shards(self) -> Path:
        return self.path / "shards"

    def shard_path(self, unit: int) -> Path:
        return self.shards / f"unit-{unit:08d}.safetensors"

    def create(self, owner: str) -> None:
        """Make the folder, and raise if it cannot be written."""
        try:
            self.shards.mkdir(parents=True, exist_ok=True)
            probe = self.shards / f".{owner}.probe"
            write_whole(probe, [b"probe"], owner)
            probe.unlink()
        except OSError as error:
            raise self.unwritable(error) from error

    def begin(self, manifest: Manifest, owner: str) -> None:
        """Write the manifest, or check that the folder has an equal one."""
        path = self.path / _manifest.NAME
        try:
            if not path.exists() and create_whole(path, manifest.encode(), owner):
                return
        except OSError as error:
            raise self.unwritable(error) from error
        check_same(self.path, Manifest.read(self.path), manifest)

    def units_done(self) -> set[int]:
        """Return the units whose shards exist."""
        try:
            names = os.listdir(self.shards)
        except FileNotFoundError:
            return set()
        return {int(found[1]) for found in map(_SHARD.fullmatch, names) if found}

    def write_index(self, rows: Mapping[int, int], owner: str) -> None:
        """Record that all units are done, with the number of rows of each."""
        content = {"units": len(rows), "rows": [rows[unit] for unit in sorted(rows)]}
        write_whole(self.path / _INDEX, [(json.dumps(content) + "\n").encode()], owner)

    def read_index(self, shards: int | None) -> list[int] | None:
        """Return the number of rows of each unit, or None if some units are not done.

        `shards` is the number of shards of the complete dataset, or None if that is unknown.
        """
        path = self.path / _INDEX
        try:
            content: Any = json.loads(path.read_bytes())
            rows = content["rows"]
            wrong = [n for n in rows if type(n) is not int or n < 0]
            if wrong or not len(rows) == content["units"] == (shards or len(rows)):
                raise ValueError("its parts do not fit together")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} was altered ({error}). Remove it, and call `harvest` again "
                "with the same arguments to write it anew."
            ) from error
        return rows

    def has_shard(self, unit: int) -> bool:
        """Return whether the shard of a unit exists."""
        return self.shard_path(unit).exists()

    def read_header(self, unit: int) -> ShardHeader:
        """Read the header of a shard."""
        path = self.shard_path(unit)
        with open(path, "rb") as file:
            beginning = file.read(8)
            beginning += file.read(min(int.from_bytes(beginning, "little"), 1 << 27))
            return decode_header(beginning, os.fstat(file.fileno()).st_size, str(path))

    @contextlib.contextmanager
    def lock(self, worker: Worker, process: int | None = None) -> Iterator[str]:
        """Lock a worker for the duration of the block, and yield the name under which it writes.

        `process` is the number of this process if several processes are one worker together. The
        operating system releases the lock when the process ends for any reason. On a file system
        without locks this locks nothing, which does no harm: two processes that do one unit write
        equal shards.
        """
        owner = f"worker-{worker.index}-of-{worker.count}"
        if process is not None:
            owner += f"-process-{process}"
        path = self.path / f".{owner}.lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise self.unwritable(error) from error
        try:
            if _lock(descriptor) is False:
                holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
                raise WorkerTakenError(
                    f"{holder} already harvests into {str(self.path)!r} as {worker}. Give every "
                    "process a different worker number, or wait until that one has ended."
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            for folder in (self.path, self.shards):
                remove_leftovers(folder, owner)
            yield owner
        finally:
            os.close(descriptor)

    def remove_leftovers(self) -> None:
        """Remove what killed workers left in a complete dataset: unfinished files and locks.

        A worker whose lock is held, or on a file system without locks, may still be running.
        """
        for path in self.path.glob(".*.lock"):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if _lock(file.fileno()):
                    for folder in (self.path, self.shards):
                        remove_leftovers(folder, path.stem.removeprefix("."))
                    path.unlink()

    def unwritable(self, error: OSError) -> UnwritableError:
        why = error.strerror or str(error)
        return UnwritableError(
            error.errno,
            f"The dataset {str(self.path)!r} cannot be written: {why}. All shards in it are "
            "complete. Once the folder can be written, call `harvest` again with the same "
            "arguments to continue",
        )


def _lock(descriptor: int) -> bool | None:
    """Lock an open file; return False if another process has locked it.

    Return None if the system, or the file system, has no locks.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True
