"""Files that are whole or not there: written beside their place, synced, and renamed.

After `write_whole` returns, the file survives a crash of the machine. Whoever is killed before that
leaves a file with the ending `.tmp`, which no reader looks at.
"""

import contextlib
import os
import uuid
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

TEMPORARY = ".tmp"


def write_whole(path: Path, parts: Iterable[bytes | memoryview], owner: str) -> None:
    """Write `parts` one behind another to `path`, whole or not at all.

    `owner` is a part of the temporary file's name, by which its leftovers are found.
    """
    beside = path.with_name(f".{path.name}.{owner}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        with open(beside, "xb", buffering=0) as file:
            for part in parts:
                _write_all(file, part)
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def create_whole(path: Path, content: bytes, owner: str) -> bool:
    """Write a file unless there is one already; return whether this call wrote it.

    Of several processes that call this at once, one succeeds.
    """
    beside = path.with_name(f".{path.name}.{owner}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        with open(beside, "xb", buffering=0) as file:
            _write_all(file, content)
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
    """Remove the temporary files that `owner` left when it was killed."""
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
    """Rename a file, unless there is one of that name."""
    try:
        os.link(source, target)  # unlike a rename, a link never replaces a file
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if target.exists():
            raise FileExistsError(target) from None
        os.replace(source, target)


def _write_all(file: FileIO, part: bytes | memoryview) -> None:
    view = memoryview(part)
    while len(view):
        view = view[file.write(view) :]
