"""Logs in JSON lines: `{"tapax": 1, "step": 100, "record": {"Net/mlp/value_rms": 0.5}}`.

A line with `"flow"` instead has the flow of data between the sites, for the page. A histogram is
`{"counts": [...], "edges": [...]}`, an array is a list, and a number that JSON lacks is a string:
"NaN". If a line cannot be written to its end, the sink removes it.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tapax.monitoring._log_format as log_format
from tapax._results.flow import Flow
from tapax.monitoring._records import AlertEvent, Histogram, Number, Record, as_floats


class jsonl:
    """A sink that appends a line of JSON to a file for each record and each alert.

    A line is on disk when the call returns. `tapax.open` reads the file.

    Args:
        path: The path of the file, such as `"run.jsonl"`. The sink makes its folder, and continues
            a log that is already there.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If the file is not a log of tapax.
        RuntimeError: If the file has a version of the format that this tapax does not know.

    Example:
        >>> import tempfile, tapax
        >>> path = f"{tempfile.mkdtemp()}/run.jsonl"
        >>> write = tapax.sink.jsonl(path)
        >>> write(0, {"Net/mlp/value_rms": 0.5})
        >>> tapax.open(path)["Net/mlp/value_rms"].values.tolist()
        [0.5]
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            if not self.path.parent.exists():
                self.path.parent.mkdir(parents=True)
            with open(self.path, "a+b") as file:
                _resume(self.path, file)
        except OSError as error:
            raise log_format.unwritable(self.path, error) from error

    def __repr__(self) -> str:
        return f"jsonl({str(self.path)!r})"

    def __call__(self, step: int, record: Record) -> None:
        numbers = {name: log_format.number_to_json(x) for name, x in as_floats(record).items()}
        self._append({"tapax": log_format.VERSION, "step": int(step), "record": numbers})

    def alert(self, event: AlertEvent) -> None:
        """Append an alert to the file.

        Args:
            event: The alert that went off.

        Raises:
            OSError: If the line cannot be written, as when the disk is full.

        Example:
            >>> import tempfile, tapax
            >>> path = f"{tempfile.mkdtemp()}/run.jsonl"
            >>> event = tapax.alert.AlertEvent(7, "h", "value_rms", 9.0, "step 7: h has rms 9.")
            >>> tapax.sink.jsonl(path).alert(event)
            >>> tapax.open(path).alerts[0].message
            'step 7: h has rms 9.'
        """
        self._append({"tapax": log_format.VERSION, "alert": log_format.alert_to_json(event)})

    def _write_flow(self, flow: Flow) -> None:
        self._append({"tapax": log_format.VERSION, "flow": flow.to_json()})

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
    """Check that the file is a log, and remove a last line that is not complete."""
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
        raise log_format.not_a_log(path, "its first line is not one of a log")
    with contextlib.suppress(ValueError):
        log_format.check_version(path, json.loads(line)["tapax"])


def _number_from_json(content: Any) -> Number:
    if isinstance(content, Mapping):
        return Histogram(*(np.array(content[key], np.float64) for key in ("counts", "edges")))
    return np.array(content, np.float64) if isinstance(content, list) else float(content)


def parse_line(path: Path, line: bytes, number: int) -> log_format.LogEntry:
    """Parse line `number` of the log at `path`; raise `IncompleteLine` if it is not complete."""
    if number == 1:
        _check_line(path, line)
    try:
        if not line.endswith(b"\n"):
            raise ValueError("it has no end")
        content = json.loads(line)
        log_format.check_version(path, content["tapax"])
        if "alert" in content:
            return log_format.alert_from_json(content["alert"])
        if "flow" in content:
            return Flow.from_json(content["flow"])
        record = {
            name: x if type(x) is float else _number_from_json(x)
            for name, x in content["record"].items()
        }
        return int(content["step"]), record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteLine from error


class IncompleteLine(Exception):
    """The error for a line that a run did not write to its end."""


def read_lines(path: Path) -> Iterator[log_format.LogEntry]:
    """Read a file of JSON lines; leave incomplete lines out, with a warning."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield parse_line(path, line, number)
            except IncompleteLine:
                log_format.warn_left_out(path, f"line {number}", 6)
