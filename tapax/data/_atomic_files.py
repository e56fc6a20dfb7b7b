"""Atomic writes: a file is written under a temporary name, synced, and renamed.

Once `write_whole` returns, or the block of `replacing` ends, the file survives a crash of the
machine. A process that is killed earlier leaves a file whose name ends in `.tmp`, which readers
ignore.
"""

import contextlib
import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

TEMPORARY = ".tmp"
_SYNCS = threading.BoundedSemaphore(2)
"""The number of files that a process syncs at once.

Threads that sync all at once would also finish at once, and the disk would then wait for the next
files. With a few at a time, some files are always ready for the disk.
"""


@contextlib.contextmanager
def replacing(path: Path, owner: str) -> Iterator[FileIO]:
    """Open a file for writing, which becomes `path` if the block ends without an error.

    The name of the temporary file contains `owner`, by which `remove_leftovers` finds it.
    """
    beside = path.with_name(f".{path.name}.{owner}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        with open(beside, "xb", buffering=0) as file:
            yield file
            with _SYNCS:
                os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_whole(path: Path, parts: Iterable[bytes | memoryview], owner: str) -> None:
    """Write `parts` to `path` atomically, one after another; see `replacing`."""
    with replacing(path, owner) as file:
        for part in parts:
            write_all(file, part)


def create_whole(path: Path, content: bytes, owner: str) -> bool:
    """Write a file unless `path` exists, and return whether this call wrote it.

    If several processes call this at once, exactly one succeeds.
    """
    beside = path.with_name(f".{path.name}.{owner}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        with open(beside, "xb", buffering=0) as file:
            write_all(file, content)
            os.fsync(file.fileno())
        try:
            _rename_to_new(beside, path)
        except FileExistsError:
            return False
        sync_folder(path.parent)
        return True
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def remove_leftovers(folder: Path, owner: str) -> None:
    """Remove the temporary files that a killed process left under the name `owner`."""
    for path in folder.glob(f".*.{owner}.*{TEMPORARY}"):
        with contextlib.suppress(OSError):
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_to_new(source: Path, target: Path) -> None:
    """Rename `source` to `target`, or raise FileExistsError if `target` exists."""
    try:
        os.link(source, target)  # unlike a rename, a link never replaces a file
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if target.exists():
            raise FileExistsError(target) from None
        os.replace(source, target)


def write_all(file: FileIO, part: bytes | memoryview) -> None:
    """Write all bytes of `part`, of which a single call may write only some."""
    view = memoryview(part)
    while len(view):
        view = view[file.write(view) :]
