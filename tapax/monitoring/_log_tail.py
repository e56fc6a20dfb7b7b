"""`LogTail`: the new entries of a log that another process is still writing.

Each call of `read` yields the records and alerts that were written since the last call. If a part
of a log cannot be read, `read` yields the entries before it, and `messages` says why.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tapax.monitoring._log_format as log_format
from tapax.monitoring._json_lines import IncompleteLine, parse_line
from tapax.monitoring._log import find_files
from tapax.monitoring._log_format import LogEntry
from tapax.monitoring._part_folder import FORMATS, IncompletePart
from tapax.monitoring._repeated_lines import RepeatedLineParser


class LogTail:
    """The entries of a log on disk that have not been read yet.

    `error` is the reason why the rest of the log cannot be read. `is_at_end` is True if the last
    `read` yielded every entry. Unless `exact`, the numbers of JSON lines are rounded in the last
    place, which is faster.

    Raises:
        FileNotFoundError: If there is nothing at `path`.
        ValueError: If `path` is not a log.
    """

    def __init__(self, path: str | os.PathLike[str], *, exact: bool = True):
        self.path = Path(path)
        self._exact = exact
        find_files(self.path)
        self.is_at_end = False
        self._forget()

    def _forget(self) -> None:
        self._readers: dict[Path, _LineReader | _PartReader] = {}
        self.error: Exception | None = None

    @property
    def messages(self) -> list[str]:
        """Sentences about the parts that could not be read so far."""
        found = [sentence for reader in self._readers.values() for sentence in reader.messages]
        return found if self.error is None else [*found, str(self.error)]

    def was_replaced(self) -> bool:
        """Return whether a new log replaced the entries read so far; if so, forget them."""
        replaced = any(reader.was_replaced() for reader in self._readers.values())
        if replaced:
            self._forget()
        return replaced

    def read(self, seconds: float = float("inf")) -> Iterator[LogEntry]:
        """Yield new entries, and stop after about `seconds`."""
        until = time.monotonic() + seconds
        self.is_at_end = False
        if self.error is not None:  # the error remains until the log is replaced
            self.is_at_end = True
            return
        try:
            for file in find_files(self.path):
                if file not in self._readers:
                    is_text = file.suffix == ".jsonl"
                    reader = _LineReader(file, self._exact) if is_text else _PartReader(file)
                    self._readers[file] = reader
                for entry in self._readers[file].read():
                    yield entry
                    if time.monotonic() > until:
                        return
        except (OSError, ValueError, RuntimeError) as error:
            self.error = error
        self.is_at_end = True


class _LineReader:
    """A reader of the lines that a run appends to a file."""

    def __init__(self, file: Path, exact: bool):
        self._file = file
        self._parser = None if exact else RepeatedLineParser()
        self._offset = self._lines = 0
        self._inode: int | None = None
        self._left_out: list[str] = []
        self._unfinished = ""

    @property
    def messages(self) -> list[str]:
        return [*self._left_out, self._unfinished] if self._unfinished else self._left_out

    def was_replaced(self) -> bool:
        try:
            status = os.stat(self._file)
        except OSError:
            return False
        is_another = self._inode is not None and status.st_ino != self._inode
        return is_another or status.st_size < self._offset

    def read(self) -> Iterator[LogEntry]:
        with open(self._file, "rb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            self._unfinished = ""
            for line in file:
                number = self._lines + 1
                try:
                    entry = self._parse(line, number)
                except IncompleteLine:
                    if not line.endswith(b"\n"):
                        self._unfinished = (
                            f"The last line of the log {str(self._file)!r} is incomplete: it "
                            "is being written, or the run was killed."
                        )
                        return
                    what = log_format.describe_left_out(self._file, f"line {number}")
                    self._left_out.append(what)
                    entry = None
                self._offset += len(line)
                self._lines = number
                if entry is not None:
                    yield entry

    def _parse(self, line: bytes, number: int) -> LogEntry:
        if self._parser is None:
            return parse_line(self._file, line, number)
        entry = self._parser.parse(line)
        if entry is None:
            entry = parse_line(self._file, line, number)
            if isinstance(entry, tuple):
                self._parser.learn(line, entry[1])
        return entry


class _PartReader:
    """A reader of the records that a run adds to a part, which each record replaces as a whole."""

    def __init__(self, file: Path):
        self._file = file
        self._version: tuple[int, int, int] | None = None
        self._counts: Counter[type] = Counter()
        self.messages: list[str] = []

    def was_replaced(self) -> bool:
        return not self._file.exists()

    def read(self) -> Iterator[LogEntry]:
        status = os.stat(self._file)
        version = status.st_ino, status.st_mtime_ns, status.st_size
        if version == self._version:
            return
        try:
            entries = FORMATS[self._file.suffix].read(self._file)
        except IncompletePart:
            part = f"the part {self._file.name!r}"
            self.messages = [log_format.describe_left_out(self._file.parent, part)]
            return
        self.messages = []
        known = Counter(self._counts)
        for entry in entries:
            kind = type(entry)
            if known[kind]:
                known[kind] -= 1
            else:
                self._counts[kind] += 1
                yield entry
        self._version = version
