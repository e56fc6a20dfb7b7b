"""Taps on disk: one safetensors file with an array for each value, gradient and mask.

The keys are `values/NAME`, `grads/NAME` and `valid/NAME`, so that every reader of safetensors finds
the arrays. The metadata of the file contains, as JSON, the types of the arrays, in the order of the
program, the sites, and the flow of data between them. A new last axis has the pairs of a complex
number, and the bytes of other types that safetensors lacks. A random key is stored as its data.

`write_taps` writes a file under another name, and renames it when it is complete.
"""

import contextlib
import dataclasses
import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tapax._jax import Value, key_generator
from tapax._results.flow import Flow
from tapax._results.host_arrays import is_key
from tapax._sites import ScannedLayers, Site
from tapax.reduce import Reducer

VERSION = "1"
_MARK = "tapax_taps"
"""The key in the metadata whose value is the version of the format."""
_KEY = "key:"
"""The type of an array of random keys begins with this; the name of the generator follows."""
_STORED = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
}  # fmt: skip
"""Types that every version of safetensors supports."""
_PAIRS = {"complex64": "float32", "complex128": "float64"}
"""Types that are stored as pairs of another type."""
_LONGEST_HEADER = 100_000_000
"""The limit in the reader of safetensors itself, in bytes."""

Arrays = Mapping[str, Mapping[str, Any]]
"""Arrays on the host, by `values`, `grads` or `valid`, and then by name."""


def write_taps(
    path: str | os.PathLike[str], arrays: Arrays, sites: Iterable[Site], flow: Flow | None = None
) -> None:
    """Write arrays, sites and the flow between them to a file, completely or not at all."""
    path = Path(path)
    types: dict[str, dict[str, str]] = {}
    stored: dict[str, np.ndarray] = {}
    for kind, named in arrays.items():
        types[kind] = {}
        for name, x in named.items():
            types[kind][name], stored[f"{kind}/{name}"] = _encode(x, f"taps.{kind}[{name!r}]")
    about = {
        _MARK: VERSION,
        "arrays": json.dumps(types),
        "sites": json.dumps([_site_to_json(site) for site in sites]),
    }
    if flow is not None:
        about["flow"] = json.dumps(flow.to_json())
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(stored, temporary, about)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OSError(
            f"The taps cannot be written to {str(path)!r}: {why}. Choose a writable path."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


class TapsContent(NamedTuple):
    """The content of a file: arrays by kind and name, the sites, and the flow if it is known."""

    arrays: dict[str, dict[str, Any]]
    sites: tuple[Site, ...]
    flow: Flow | None


def holds_taps(path: str | os.PathLike[str]) -> bool:
    """Return whether `Taps.save` wrote the file; it may be incomplete."""
    if not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        return _read_header(file) is not None


def read_taps(path: str | os.PathLike[str]) -> TapsContent:
    """Read a file that `write_taps` wrote, as NumPy arrays."""
    # Replacing the file meanwhile does not affect a reader that has opened it.
    with open(path, "rb") as file:
        header = _read_header(file)
        if header is None:
            raise _not_readable(path, "`Taps.save` did not write it")
        if header.about[_MARK] != VERSION:
            raise RuntimeError(
                f"{os.fspath(path)!r} is in version {header.about[_MARK]} of the format of taps, "
                f"but this tapax reads version {VERSION}. Use the version of tapax that wrote it."
            )
        size = os.fstat(file.fileno()).st_size
        if size < header.end:
            raise _not_readable(path, f"it is not complete: it has {size} of {header.end} bytes")
        try:
            types = json.loads(header.about["arrays"])
            arrays = {
                kind: {
                    name: _read_array(file, header, f"{kind}/{name}", dtype)
                    for name, dtype in named.items()
                }
                for kind, named in types.items()
            }
            sites = tuple(map(_site_from_json, json.loads(header.about["sites"])))
            flow = json.loads(header.about.get("flow", "null"))
            flow = None if flow is None else Flow.from_json(flow)
        except (KeyError, TypeError, ValueError) as error:
            raise _not_readable(path, f"its parts do not fit together ({error})") from error
    return TapsContent(arrays, sites, flow)


def _not_readable(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(f"The taps in {os.fspath(path)!r} cannot be read: {why}. Save them again.")


@dataclasses.dataclass(frozen=True)
class _Header:
    """The beginning of a safetensors file: its metadata, and where the arrays are."""

    about: dict[str, str]
    entries: dict[str, Any]
    start: int

    @property
    def end(self) -> int:
        return self.start + max((x["data_offsets"][1] for x in self.entries.values()), default=0)


def _read_header(file: BinaryIO) -> _Header | None:
    """Read the header of a file of taps; return None for any other file."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(_LONGEST_HEADER, os.fstat(file.fileno()).st_size):
        return None
    try:
        entries = json.loads(file.read(length))
    except ValueError:
        return None
    about = entries.pop("__metadata__", None) if isinstance(entries, dict) else None
    return _Header(about, entries, 8 + length) if about and _MARK in about else None


def _read_array(file: BinaryIO, header: _Header, key: str, dtype: str) -> Any:
    first, last = header.entries[key]["data_offsets"]
    file.seek(header.start + first)
    data = np.fromfile(file, np.uint8, last - first)
    return _decode(dtype, header.entries[key]["shape"], data)


def _encode(x: Value, what: str) -> tuple[str, np.ndarray]:
    """Return the name of an array's type, and the array that is stored for it."""
    if is_key(x):
        return f"{_KEY}{key_generator(x.dtype)}", np.asarray(jax.random.key_data(x), order="C")
    x = np.asarray(x, order="C")
    if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise TypeError(f"{what} must be an array of numbers, but is of type {x.dtype}.")
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder())
    name = x.dtype.name
    return name, x if name in _STORED else _as_parts(x)


def _as_parts(x: np.ndarray) -> np.ndarray:
    """Put the parts of complex numbers, or the bytes of other types, along a new last axis."""
    part = np.dtype(_PAIRS.get(x.dtype.name, "uint8"))
    return np.frombuffer(x.tobytes(), part).reshape(*x.shape, x.dtype.itemsize // part.itemsize)


def _decode(name: str, shape: list[int], data: np.ndarray) -> Any:
    if name.startswith(_KEY):
        numbers = jnp.asarray(data.view(np.uint32).reshape(shape))
        return jax.random.wrap_key_data(numbers, impl=name.removeprefix(_KEY))
    return data.view(_dtype_of(name)).reshape(shape if name in _STORED else shape[:-1])


def _dtype_of(name: str) -> Any:
    if name.startswith(_KEY):
        return jax.eval_shape(lambda: jax.random.key(0, impl=name.removeprefix(_KEY))).dtype
    return jnp.dtype(name)


def _site_to_json(site: Site) -> dict[str, Any]:
    fields = {field.name: getattr(site, field.name) for field in dataclasses.fields(site)}
    dtype = fields.pop("dtype")
    plain = {name: _to_json(value) for name, value in fields.items()}
    return {**plain, "dtype": None if dtype is None else _name_of_dtype(dtype)}


def _name_of_dtype(dtype: Any) -> str:
    is_random = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return f"{_KEY}{key_generator(dtype)}" if is_random else np.dtype(dtype).name


def _to_json(value: Any) -> Any:
    """Convert plain data, a class to its name, a reducer to its plain fields; others to None."""
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value if not isinstance(value, float) or math.isfinite(value) else str(value)
    if isinstance(value, (tuple, list)):
        return [_to_json(part) for part in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Reducer):
        fields = {name: getattr(value, name) for name in _REDUCER_FIELDS}
        return {"reducer": {name: _to_json(field) for name, field in fields.items()}}
    return None


def _site_from_json(content: dict[str, Any]) -> Site:
    known = {field.name for field in dataclasses.fields(Site)}
    fields = {name: _from_json(value) for name, value in content.items() if name in known}
    dtype = fields["dtype"]
    fields["dtype"] = None if dtype is None else _dtype_of(dtype)
    fields["layers"] = tuple(ScannedLayers(*layers) for layers in fields.get("layers", ()))
    return Site(**fields)


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    if isinstance(value, dict):
        fields = {name: _from_json(field) for name, field in value["reducer"].items()}
        if fields["edges"] is not None:
            fields["edges"] = tuple(map(float, fields["edges"]))
        forgotten = _forgotten(fields["name"])
        return Reducer(forgotten, forgotten, forgotten, forgotten, **fields)
    return value


_REDUCER_FIELDS = (
    *("name", "needs", "paired", "over_maps", "over_loops", "axis", "edges", "labels", "one_in"),
)
"""The fields of a reducer that are not functions."""


def _forgotten(name: str) -> Callable[..., Any]:
    """Make a function that takes the place of a reducer's functions, which no file can store."""

    def raise_error(*args: Any) -> Any:
        raise TypeError(
            f"The reducer {name!r} was read from a file, which stores its name but not its "
            "functions, so it cannot reduce anything. Make a new one with tapax.reduce."
        )

    return raise_error
