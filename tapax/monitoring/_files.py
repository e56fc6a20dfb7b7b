"""Logs on disk: JSON lines, and folders of Parquet or safetensors parts.

Each file says in which version of the format it is. A record is on disk as soon as it was written,
and what was there before stays whole whatever happens: a line that could not be written to its end
is taken back; a part is written beside, then renamed.

- JSON lines: `{"tapax": 1, "step": 100, "record": {"Net/mlp/value_rms": 0.5}}`. A histogram is
  `{"counts": [...], "edges": [...]}`, an array a list, a number that JSON has not, a string: "NaN".
- Parquet: a row for each number, with the columns `step`, `name`, and `value` of a number, `values`
  and `shape` of an array, `counts` and `edges` of a histogram.
- safetensors: an array for each name, its first axis the records. `/steps` are their steps,
  `/at/NAME` says which records have the name, if not all do, and `/edges/NAME` are the edges
  of a histogram, whose array are its counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tapax.monitoring._log import Alarm, Histogram, Number, Record

VERSION = 1
RECORDS, BYTES = 256, 1 << 20
"""How much a part holds: it is written anew for each of its records."""

Entry = tuple[int, "dict[str, Number] | None", "list[Alarm]"]


def plain(record: Record) -> dict[str, Number]:
    """A record of floats, arrays of float64, and histograms of such."""
    return {name: _plain(number) for name, number in record.items()}


def _plain(number: Any) -> Number:
    if isinstance(number, float):
        return number
    if isinstance(number, Histogram):
        return Histogram(*(np.asarray(a, np.float64) for a in (number.counts, number.edges)))
    array = np.asarray(number, np.float64)
    return array if array.ndim else float(array)


def _unwritable(path: Path, error: OSError) -> OSError:
    why = error.strerror or str(error)
    return OSError(f"The log {str(path)!r} cannot be written: {why}. Give a path that can be.")


class JsonLines:
    """Writes a line for each record."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            if not self.path.parent.exists():
                self.path.parent.mkdir(parents=True)
            with open(self.path, "a+b") as file:
                _resume(self.path, file)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def __repr__(self) -> str:
        return f"jsonl({str(self.path)!r})"

    def __call__(self, step: int, record: Record) -> None:
        numbers = {name: _to_json(number) for name, number in plain(record).items()}
        self._append({"tapax": VERSION, "step": int(step), "record": numbers})

    def alert(self, alarm: Alarm) -> None:
        self._append({"tapax": VERSION, "alert": _alarm_to_json(alarm)})

    def _append(self, content: dict[str, Any]) -> None:
        line = memoryview(json.dumps(content, allow_nan=False).encode() + b"\n")
        with open(self.path, "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                while line:
                    line = line[file.write(line) or 0 :]
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(size)
                raise


def _resume(path: Path, file: Any) -> None:
    """Makes sure that what is there is a log, and takes back a line that was not ended."""
    file.seek(0)
    first = file.readline()
    if not first:
        return
    _check_line(path, first)
    end = file.seek(0, os.SEEK_END)
    at = end
    while at > 0:
        start = max(0, at - 65536)
        file.seek(start)
        newline = file.read(at - start).rfind(b"\n")
        if newline >= 0:
            at = start + newline + 1
            break
        at = start
    if at < end:
        file.truncate(at)


def _check_line(path: Path, line: bytes) -> None:
    begins = b'{"tapax": '
    if not line.startswith(begins) and not begins.startswith(line):
        raise no_log(path, "its first line is not one of a log")
    with contextlib.suppress(ValueError):
        check_version(path, json.loads(line)["tapax"])


def check_version(path: Path, version: Any) -> None:
    """Refuses what another version wrote."""
    if version != VERSION:
        raise RuntimeError(
            f"{str(path)!r} was written in version {version} of the format of logs, but this "
            f"tapax knows version {VERSION}. Use the version of tapax that wrote it."
        )


def no_log(path: Path, why: str) -> ValueError:
    """The error for a path that is no log."""
    return ValueError(
        f"{str(path)!r} is no log that tapax wrote: {why}. A log is a .jsonl file, or a folder "
        "of .parquet or .safetensors parts."
    )


def _to_json(number: Number) -> Any:
    if isinstance(number, Histogram):
        return {"counts": _to_json(number.counts), "edges": _to_json(number.edges)}
    if isinstance(number, np.ndarray):
        return number.tolist() if np.isfinite(number).all() else [_to_json(x) for x in number]
    number = float(number)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _from_json(content: Any) -> Number:
    if isinstance(content, Mapping):
        return Histogram(*(np.array(content[key], np.float64) for key in ("counts", "edges")))
    return np.array(content, np.float64) if isinstance(content, list) else float(content)


def _alarm_to_json(alarm: Alarm) -> dict[str, Any]:
    return {**dataclasses.asdict(alarm), "number": _to_json(float(alarm.number))}


def _alarm(content: Mapping[str, Any]) -> Alarm:
    return Alarm(**{**content, "number": float(content["number"])})


def read_lines(path: Path) -> Iterator[Entry]:
    """What is in a file of JSON lines."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                _check_line(path, line)
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it has no end")
                content = json.loads(line)
                check_version(path, content["tapax"])
                if "alert" in content:
                    yield 0, None, [_alarm(content["alert"])]
                    continue
                record = {name: _from_json(x) for name, x in content["record"].items()}
                step = int(content["step"])
            except (ValueError, KeyError, TypeError, AttributeError):
                leave_out(path, f"line {number}", 5)
                continue
            yield step, record, []


def leave_out(path: Path, what: str, stacklevel: int) -> None:
    """Warns of what is not whole."""
    warnings.warn(
        f"In the log {str(path)!r}, {what} was left out: it is not whole, as if the run that wrote "
        "it had been killed, or the disk had been full.",
        stacklevel=stacklevel,
    )


class Parts:
    """Writes a folder of parts. The last is written anew for each record until it is full."""

    suffix = ""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._load()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Two runs that write into one folder at a time must not write the same parts.
            self._run = uuid.uuid4().hex[:8]
            probe = self.path / f".{self._run}.tmp"
            probe.write_bytes(b"")
            probe.unlink()
            found = parts(self.path, self.suffix)
            others = [p for p in self.path.iterdir() if p.name[0] != "."]
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if others and not found:
            raise no_log(self.path, f"it holds {others[0].name!r}")
        if found:
            with contextlib.suppress(Torn):
                self._decode(found[-1])
        self._number = 1 + max((_number(part) for part in found), default=-1)
        self._begin()

    def __repr__(self) -> str:
        return f"{self.suffix[1:]}({str(self.path)!r})"

    def _begin(self) -> None:
        self._records: list[Any] = []
        self._alarms: list[Alarm] = []
        self._size = 0

    def __call__(self, step: int, record: Record) -> None:
        numbers = plain(record)
        if self._records and not self._fits(numbers):
            self._next()
        self._add(int(step), numbers)
        self._size += sum(map(_nbytes, numbers.values()))
        self._write()
        if len(self._records) >= RECORDS or self._size >= BYTES:
            self._next()

    def alert(self, alarm: Alarm) -> None:
        self._alarms.append(alarm)
        self._write()

    def _next(self) -> None:
        self._number += 1
        self._begin()

    def _write(self) -> None:
        part = self.path / f"part-{self._number:05d}-{self._run}{self.suffix}"
        beside = part.with_name(f".{part.stem}.tmp")
        about = {"tapax": str(VERSION), "alerts": json.dumps([*map(_alarm_to_json, self._alarms)])}
        content = self._encode(about)
        try:
            with open(beside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, part)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise

    @classmethod
    def read(cls, path: Path) -> Iterator[Entry]:
        """What is in one part."""
        about, records = cls._decode(path)
        for step, record in records:
            yield step, record, []
        yield 0, None, [_alarm(alarm) for alarm in json.loads(about["alerts"])]

    def _load(self) -> None:
        """Imports what the format needs."""

    def _fits(self, record: Mapping[str, Number]) -> bool:
        """Whether a record can be in the part that is open."""
        return True

    def _add(self, step: int, record: dict[str, Number]) -> None:
        self._records.append((step, record))

    def _encode(self, about: dict[str, str]) -> Any:
        raise NotImplementedError

    @classmethod
    def _decode(cls, path: Path) -> tuple[dict[str, str], list[tuple[int, dict[str, Number]]]]:
        raise NotImplementedError


class Torn(Exception):
    """A part is not whole."""


def _nbytes(number: Number) -> int:
    if isinstance(number, Histogram):
        return number.counts.nbytes + number.edges.nbytes
    return number.nbytes if isinstance(number, np.ndarray) else 24


def parts(folder: Path, suffix: str) -> list[Path]:
    """The parts in a folder, in order."""
    found = [
        p for p in folder.iterdir() if re.fullmatch(r"part-\d+-\w+" + re.escape(suffix), p.name)
    ]
    return sorted(found, key=lambda p: (_number(p), p.name))


def _number(part: Path) -> int:
    return int(part.name.split("-")[1])
