"""The parts of a log in Parquet and in safetensors, and how any log is read: see `_files`."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from tapax.monitoring._files import (
    Entry,
    Parts,
    Torn,
    check_version,
    leave_out,
    no_log,
    parts,
    read_lines,
)
from tapax.monitoring._log import Histogram, Number


class Safetensors(Parts):
    """An array for each name."""

    suffix = ".safetensors"

    def _begin(self) -> None:
        super()._begin()
        self._found: dict[str, tuple[list[int], list[Any], Any]] = {}

    def _fits(self, record: Mapping[str, Number]) -> bool:
        known = self._found
        return all(known[name][2] == _kind(x) for name, x in record.items() if name in known)

    def _add(self, step: int, record: dict[str, Number]) -> None:
        for name, x in record.items():
            places, numbers, _ = self._found.setdefault(name, ([], [], _kind(x)))
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
        # safetensors sorts them; the order of the names is that of the program.
        about = {**about, "names": json.dumps(list(self._found))}
        return safetensors.numpy.save(arrays, about)

    @classmethod
    def _decode(cls, path: Path) -> tuple[dict[str, str], list[tuple[int, dict[str, Number]]]]:
        try:
            with safetensors.safe_open(path, "numpy") as file:
                about = file.metadata() or {}
                _check(path, about)
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise Torn from error
        steps = arrays["/steps"]
        records: list[tuple[int, dict[str, Number]]] = [(int(step), {}) for step in steps]
        for name in json.loads(about["names"]):
            edges = arrays.get(f"/edges/{name}")
            places = arrays.get(f"/at/{name}", range(len(steps)))
            for i, x in zip(places, arrays[name], strict=True):
                number = Histogram(x, edges) if edges is not None else x if x.ndim else float(x)
                records[i][1][name] = number
        return about, records


def _kind(number: Number) -> tuple[Any, Any]:
    if isinstance(number, Histogram):
        return number.counts.shape, tuple(number.edges.tolist())
    return np.shape(number), None


class Parquet(Parts):
    """A row for each number."""

    suffix = ".parquet"

    def _load(self) -> None:
        _pyarrow()

    def _add(self, step: int, record: dict[str, Number]) -> None:
        pa, _ = _pyarrow()
        # A record without numbers is a row without a name.
        rows = [_row(step, name, number) for name, number in record.items()]
        rows = rows or [(step, None, *[None] * 5)]
        columns = zip(*rows, strict=True)
        kinds = [field.type for field in _schema()]
        arrays = [pa.array(c, k) for c, k in zip(columns, kinds, strict=True)]
        self._records.append(pa.record_batch(arrays, schema=_schema()))

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
            raise Torn from error
        found = table.schema.metadata or {}
        about = {key.decode(): value.decode() for key, value in found.items()}
        _check(path, about)
        rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
        records = []
        for length in json.loads(about["lengths"]):
            of_record = [next(rows) for _ in range(length)]
            numbers = {row[1]: _number(row) for row in of_record if row[1] is not None}
            records.append((of_record[0][0], numbers))
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


def _row(step: int, name: str, number: Number) -> tuple[Any, ...]:
    if isinstance(number, Histogram):
        shape = list(number.counts.shape)
        return step, name, None, None, shape, number.counts.ravel(), number.edges
    if isinstance(number, np.ndarray):
        return step, name, None, number.ravel(), list(number.shape), None, None
    return step, name, number, None, None, None, None


def _number(row: tuple[Any, ...]) -> Number:
    _, _, value, values, shape, counts, edges = row
    if counts is not None:
        return Histogram(np.array(counts, np.float64).reshape(shape), np.array(edges, np.float64))
    return value if values is None else np.array(values, np.float64).reshape(shape)


def _check(path: Path, about: Mapping[str, str]) -> None:
    if "tapax" not in about:
        raise no_log(path, "it does not say that it is one")
    version = about["tapax"]
    check_version(path, int(version) if version.isdigit() else version)


FORMATS: dict[str, type[Parts]] = {".parquet": Parquet, ".safetensors": Safetensors}


def read(path: str | os.PathLike[str]) -> Iterator[Entry]:
    """Every record in a log, and every alarm."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no log {str(path)!r}: nothing has that name.")
    if path.is_file() and path.suffix == ".jsonl":
        yield from read_lines(path)
        return
    if path.is_file() and path.suffix not in FORMATS:
        raise no_log(path, f"its name ends in {path.suffix!r}" if path.suffix else "it is a file")
    if path.is_file():
        found = [path]
    else:
        found = [part for suffix in FORMATS for part in parts(path, suffix)]
        if not found and (path.suffix not in FORMATS or any(path.iterdir())):
            raise no_log(path, "it holds no parts of one")
    for part in found:
        reader = FORMATS[part.suffix]
        try:
            entries = list(reader.read(part))
        except Torn:
            if path.is_file():
                raise no_log(path, f"it is no {part.suffix[1:]} file, or not a whole one") from None
            leave_out(path, f"the part {part.name!r}", 4)
            continue
        yield from entries
