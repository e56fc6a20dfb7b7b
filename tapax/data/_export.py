"""Exports of datasets to Parquet, Arrow and Lance, piece by piece.

A site becomes a column of lists of a fixed size. Arrow lacks bfloat16 and float8, so these are
written as float32, which represents all of their numbers exactly.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tapax.data._lazy_array import LazyArray

_PIECE = 1 << 25
"""The approximate number of bytes that are converted at a time."""


def export_dataset(arrays: Mapping[str, LazyArray], path: str | os.PathLike[str]) -> None:
    """Write arrays to a file atomically, in the format that the ending of `path` names."""
    path = Path(path)
    write = _FORMATS.get(path.suffix)
    if write is None:
        raise ValueError(
            f"A dataset is exported to {', '.join(_FORMATS)}, but {str(path)!r} ends in "
            f"{path.suffix!r}."
        )
    if path.exists():
        raise FileExistsError(f"{str(path)!r} is there already: give a new name, or remove it.")
    for name, array in arrays.items():
        if 0 in array.shape[1:]:  # pyarrow would end the process
            raise ValueError(
                f"The rows of {name!r} have the shape {list(array.shape[1:])}, so there is nothing "
                "to export. Leave it out by `sites`."
            )
    pa = _import("pyarrow", "lance" if path.suffix == ".lance" else "parquet")
    schema = pa.schema({name: _type(pa, array) for name, array in arrays.items()})
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(pa, beside, schema, _pieces(pa, arrays, schema))
        os.replace(beside, path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"The dataset cannot be exported to {str(path)!r}: {error.strerror or error}. Choose a "
            "path that can be written",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(beside) if beside.is_dir() else beside.unlink()


def _pieces(pa: Any, arrays: Mapping[str, LazyArray], schema: Any) -> Iterator[Any]:
    rows = len(next(iter(arrays.values())))
    row_bytes = sum(array.nbytes for array in arrays.values()) // max(rows, 1)
    step = max(1, _PIECE // max(row_bytes, 1))
    for start in range(0, rows, step):
        columns = [
            _column(pa, array[start : start + step], schema.field(name).type)
            for name, array in arrays.items()
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _type(pa: Any, array: LazyArray) -> Any:
    element = pa.from_numpy_dtype(_exported(array.dtype))
    width = math.prod(array.shape[1:])
    return element if array.ndim == 1 else pa.list_(element, width)


def _exported(dtype: np.dtype[Any]) -> np.dtype[Any]:
    is_foreign = dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    return np.dtype(np.float32) if is_foreign else dtype


def _column(pa: Any, x: np.ndarray, kind: Any) -> Any:
    flat = pa.array(x.astype(_exported(x.dtype), copy=False).reshape(-1))
    return flat if x.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, type=kind)


def _write_parquet(pa: Any, path: Path, schema: Any, pieces: Iterator[Any]) -> None:
    parquet = _import("pyarrow.parquet", "parquet")
    with parquet.ParquetWriter(path, schema) as writer:
        for piece in pieces:
            writer.write_batch(piece)


def _write_arrow(pa: Any, path: Path, schema: Any, pieces: Iterator[Any]) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for piece in pieces:
            writer.write_batch(piece)


def _write_lance(pa: Any, path: Path, schema: Any, pieces: Iterator[Any]) -> None:
    lance = _import("lance", "lance")
    lance.write_dataset(pa.RecordBatchReader.from_batches(schema, pieces), str(path))


_FORMATS: Mapping[str, Callable[[Any, Path, Any, Iterator[Any]], None]] = {
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
    ".lance": _write_lance,
}


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"This export needs {package}, which is not installed: pip install 'tapax[{extra}]'."
        ) from error
