"""Logs in folders of parts: files of many records each, in Parquet or in safetensors.

For each record the sink writes the whole last part to a temporary file, which replaces the part.
The metadata of a part has its alerts and, in the first part of a run, the flow of data between the
sites.

- Parquet: a row for each number, with the columns `step` and `name`; `value` for a float; `values`
  and `shape` for an array; `counts`, `shape` and `edges` for a histogram.
- safetensors: an array for each name, with the records along the first axis; for a histogram, these
  are its counts, and `/edges/NAME` contains its edges. `/steps` contains the steps of the records.
  If some records lack the name, `/at/NAME` contains the indices of the records that have it.
"""

import contextlib
import importlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

import tapax.monitoring._log_format as log_format
from tapax._results.flow import Flow
from tapax.monitoring._records import AlertEvent, Histogram, Number, Record, as_floats

RECORDS, BYTES = 256, 1 << 20
"""The limits of a part. They are low because each record rewrites the whole part."""


class PartFolder:
    """A sink that writes a folder of parts. Each record rewrites its part until that is full."""

    suffix = ""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Two runs that write to one folder at the same time must not write the same parts.
            self._run = uuid.uuid4().hex[:8]
            self._next_flow: Flow | None = None
            probe = self.path / f".{self._run}.tmp"
            probe.write_bytes(b"")
            probe.unlink()
            found = find_parts(self.path, self.suffix)
            others = [p for p in self.path.iterdir() if p.name[0] != "."]
        except OSError as error:
            raise log_format.unwritable(self.path, error) from error
        if others and not found:
            raise log_format.not_a_log(self.path, f"it contains {others[0].name!r}")
        if found:
            with contextlib.suppress(IncompletePart):
                self._decode(found[-1])
        self._begin(1 + max((_part_number(part) for part in found), default=-1))

    def __repr__(self) -> str:
        return f"{self.suffix[1:]}({str(self.path)!r})"

    def _begin(self, number: int) -> None:
        self._number = number
        self._records: list[Any] = []
        self._alerts: list[AlertEvent] = []
        self._flow: Flow | None = None
        self._size = 0

    def __call__(self, step: int, record: Record) -> None:
        numbers = as_floats(record)
        if self._records and not self._fits(numbers):
            self._begin(self._number + 1)
        self._add(int(step), numbers)
        self._size += sum(map(_nbytes, numbers.values()))
        self._write()
        if len(self._records) >= RECORDS or self._size >= BYTES:
            self._begin(self._number + 1)

    def alert(self, event: AlertEvent) -> None:
        """Add an alert to the last part."""
        self._alerts.append(event)
        self._write()

    def _write_flow(self, flow: Flow) -> None:
        # Not yet in `_flow`: the record that comes next may begin another part.
        self._next_flow = flow

    def _write(self) -> None:
        if self._next_flow is not None:
            self._flow, self._next_flow = self._next_flow, None
        part = self.path / f"part-{self._number:05d}-{self._run}{self.suffix}"
        beside = part.with_name(f".{part.stem}.tmp")
        about = {
            "tapax": str(log_format.VERSION),
            "alerts": json.dumps([*map(log_format.alert_to_json, self._alerts)]),
        }
        if self._flow is not None:
            about["flow"] = json.dumps(self._flow.to_json())
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
    def read(cls, path: Path) -> list[log_format.LogEntry]:
        """Read the flow, the records and the alerts of one part."""
        about, records = cls._decode(path)
        flow = [Flow.from_json(json.loads(about["flow"]))] if "flow" in about else []
        return [*flow, *records, *map(log_format.alert_from_json, json.loads(about["alerts"]))]

    def _fits(self, record: Mapping[str, Number]) -> bool:
        """Return whether the last part can take a record."""
        return True

    def _add(self, step: int, record: dict[str, Number]) -> None:
        self._records.append((step, record))

    def _encode(self, about: dict[str, str]) -> Any:
        raise NotImplementedError

    @classmethod
    def _decode(cls, path: Path) -> tuple[dict[str, str], list[tuple[int, dict[str, Number]]]]:
        raise NotImplementedError


class IncompletePart(Exception):
    """The error for a part that a run did not write to its end."""


def _nbytes(number: Number) -> int:
    if isinstance(number, Histogram):
        return number.counts.nbytes + number.edges.nbytes
    return number.nbytes if isinstance(number, np.ndarray) else 24


def find_parts(folder: Path, suffix: str) -> list[Path]:
    """List the parts in a folder, in order."""
    name = re.compile(r"part-\d+-\w+" + re.escape(suffix))
    found = [p for p in folder.iterdir() if name.fullmatch(p.name)]
    return sorted(found, key=lambda p: (_part_number(p), p.name))


def _part_number(part: Path) -> int:
    return int(part.name.split("-")[1])


class safetensors(PartFolder):
    """A sink that writes a folder of safetensors files, with an array for each name.

    A record is on disk when the call returns. `tapax.open` reads the folder.

    Args:
        path: The path of the folder, such as `"run.safetensors"`. The sink makes the folder, and
            continues a log that is already there.

    Raises:
        OSError: If the folder cannot be written.
        ValueError: If the folder contains other files.
        RuntimeError: If the log has a version of the format that this tapax does not know.

    Example:
        >>> import tempfile, tapax
        >>> path = f"{tempfile.mkdtemp()}/run.safetensors"
        >>> write = tapax.sink.safetensors(path)
        >>> write(0, {"Net/mlp/value_rms": 0.5})
        >>> tapax.open(path)["Net/mlp/value_rms"].values.tolist()
        [0.5]
    """

    suffix = ".safetensors"

    def _begin(self, number: int) -> None:
        super()._begin(number)
        self._found: dict[str, tuple[list[int], list[Any], Any]] = {}

    def _fits(self, record: Mapping[str, Number]) -> bool:
        known = self._found
        return all(
            known[name][2] == _shape_and_edges(x) for name, x in record.items() if name in known
        )

    def _add(self, step: int, record: dict[str, Number]) -> None:
        for name, x in record.items():
            places, numbers, _ = self._found.setdefault(name, ([], [], _shape_and_edges(x)))
            places.append(len(self._records))
            numbers.append(x.counts if isinstance(x, Histogram) else x)
        self._records.append(step)

    def _encode(self, about: dict[str, str]) -> bytes:
        arrays: dict[str, Any] = {"/steps": np.array(self._records, np.int64)}
        for name, (places, numbers, (_, edges)) in self._found.items():
            arrays[name] = np.array(numbers, np.float64)
            if edges is not None:
                arrays[f"/edges/{name}"] = np.array(edges, np.float64)
            if len(places) < len(self._records):
                arrays[f"/at/{name}"] = np.array(places, np.int64)
        # safetensors sorts its arrays, so write the names in the order of the program.
        about = {**about, "names": json.dumps(list(self._found))}
        return save(arrays, about)

    @classmethod
    def _decode(cls, path: Path) -> tuple[dict[str, str], list[tuple[int, dict[str, Number]]]]:
        try:
            with safe_open(path, "numpy") as file:
                about = file.metadata() or {}
                _check_about(path, about)
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise IncompletePart from error
        steps = arrays["/steps"]
        records: list[tuple[int, dict[str, Number]]] = [(int(step), {}) for step in steps]
        for name in json.loads(about["names"]):
            edges = arrays.get(f"/edges/{name}")
            places = arrays.get(f"/at/{name}", range(len(steps)))
            for i, x in zip(places, arrays[name], strict=True):
                number = Histogram(x, edges) if edges is not None else x if x.ndim else float(x)
                records[i][1][name] = number
        return about, records


def _shape_and_edges(number: Number) -> tuple[Any, Any]:
    if isinstance(number, Histogram):
        return number.counts.shape, tuple(number.edges.tolist())
    return np.shape(number), None


class parquet(PartFolder):
    """A sink that writes a folder of Parquet files, with a row for each number.

    The columns are `step`, `name`, `value`, `values`, `shape`, `counts` and `edges`. A record is on
    disk when the call returns. `tapax.open` reads the folder.

    Args:
        path: The path of the folder, such as `"run.parquet"`. The sink makes the folder, and
            continues a log that is already there.

    Raises:
        ImportError: If pyarrow is not installed.
        OSError: If the folder cannot be written.
        ValueError: If the folder contains other files.
        RuntimeError: If the log has a version of the format that this tapax does not know.

    Example:
        >>> import tempfile, tapax
        >>> path = f"{tempfile.mkdtemp()}/run.parquet"
        >>> write = tapax.sink.parquet(path)
        >>> write(0, {"Net/mlp/value_rms": 0.5})
        >>> tapax.open(path)["Net/mlp/value_rms"].values.tolist()
        [0.5]
    """

    suffix = ".parquet"

    def __init__(self, path: str | os.PathLike[str]):
        _pyarrow()  # raise at once if pyarrow is missing
        super().__init__(path)

    def _add(self, step: int, record: dict[str, Number]) -> None:
        pa, _ = _pyarrow()
        # A record without numbers is a row without a name.
        rows = [{"step": step, "name": name, **_columns(x)} for name, x in record.items()]
        self._records.append(pa.RecordBatch.from_pylist(rows or [{"step": step}], _schema()))

    def _encode(self, about: dict[str, str]) -> Any:
        pa, pq = _pyarrow()
        about = {**about, "lengths": json.dumps([len(batch) for batch in self._records])}
        table = pa.Table.from_batches(self._records, _schema()).replace_schema_metadata(about)
        out = pa.BufferOutputStream()
        pq.write_table(table, out)
        return out.getvalue()

    @classmethod
    def _decode(cls, path: Path) -> tuple[dict[str, str], list[tuple[int, dict[str, Number]]]]:
        pa, pq = _pyarrow()
        try:
            table = pq.ParquetFile(path).read()
        except pa.ArrowException as error:
            raise IncompletePart from error
        found = table.schema.metadata or {}
        about = {key.decode(): value.decode() for key, value in found.items()}
        _check_about(path, about)
        rows = iter(table.to_pylist())
        records = []
        for length in json.loads(about["lengths"]):
            first, *others = (next(rows) for _ in range(length))
            named = [row for row in (first, *others) if row["name"] is not None]
            records.append((first["step"], {row["name"]: _number_in(row) for row in named}))
        return about, records


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            "A log in Parquet needs pyarrow: pip install 'tapax[parquet]'. JSON lines and "
            "safetensors need nothing more."
        ) from error


def _schema() -> Any:
    pa, _ = _pyarrow()
    numbers = pa.list_(pa.float64())
    return pa.schema(
        {
            "step": pa.int64(),
            "name": pa.string(),
            "value": pa.float64(),
            "values": numbers,
            "shape": pa.list_(pa.int64()),
            "counts": numbers,
            "edges": numbers,
        }
    )


def _columns(number: Number) -> dict[str, Any]:
    if isinstance(number, Histogram):
        counts, shape = number.counts.ravel(), list(number.counts.shape)
        return {"counts": counts, "shape": shape, "edges": number.edges}
    if isinstance(number, np.ndarray):
        return {"values": number.ravel(), "shape": list(number.shape)}
    return {"value": number}


def _number_in(row: dict[str, Any]) -> Number:
    values, counts, edges = (
        None if row[name] is None else np.array(row[name], np.float64)
        for name in ("values", "counts", "edges")
    )
    if counts is not None and edges is not None:
        return Histogram(counts.reshape(row["shape"]), edges)
    return row["value"] if values is None else values.reshape(row["shape"])


def _check_about(path: Path, about: Mapping[str, str]) -> None:
    if "tapax" not in about:
        raise log_format.not_a_log(path, "it does not say that it is one")
    version = about["tapax"]
    log_format.check_version(path, int(version) if version.isdigit() else version)


FORMATS: dict[str, type[PartFolder]] = {".parquet": parquet, ".safetensors": safetensors}
