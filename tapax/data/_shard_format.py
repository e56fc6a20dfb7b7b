"""The header of a shard: a safetensors file that describes its content and has checksums of it.

The metadata of the file has two strings. `tapax_shard` is JSON: the unit, the configuration, the
number of rows, the arrays with their places and checksums, and the statistics that are numbers.
`crc32` is the checksum of `tapax_shard`, which readers compare before they use it. `docs/format.md`
specifies the format.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

VERSION = 1
BLOCK = 1 << 18
"""The number of bytes of an array that share a checksum."""
ALIGNMENT = 64
"""The number of bytes of which the data of a shard starts at a multiple."""
_LONGEST_HEADER = 100_000_000
"""The limit of the reader of safetensors, in bytes."""

SAFETENSORS_TYPES: Mapping[str, str] = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""The dtypes that a shard can contain, with their names in safetensors."""


class ShardError(ValueError):
    """The error for a shard that is truncated, altered, missing, or part of another dataset.

    The message names the shard. Once a damaged shard is removed, a call of `tapax.harvest` with
    equal arguments computes it.

    Example:
        >>> import pathlib, tempfile, jax.numpy as jnp, tapax
        >>> double = lambda x: tapax.sow(2 * x, "h")
        >>> acts = tapax.harvest(double, [jnp.ones((8, 3))], to=tempfile.mkdtemp())
        >>> for shard in pathlib.Path(acts.path).glob("shards/*"):
        ...     _ = shard.write_bytes(b"")
        >>> try:
        ...     acts["h"][0]
        ... except tapax.data.ShardError as error:
        ...     print("is empty" in str(error))
        True
    """


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in a shard: its dtype, the place of its bytes in the data, and their checksums."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    checksums: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


@dataclasses.dataclass(frozen=True)
class ShardHeader:
    """The content of the header of a shard; the arrays begin at byte `data_start` of the file."""

    configuration: str
    unit: int
    rows: int
    arrays: Mapping[str, StoredArray]
    numbers: Mapping[str, Any]
    data_start: int = 0

    @functools.cached_property
    def nbytes(self) -> int:
        """The length of the whole file, in bytes."""
        return self.data_start + max((array.stop for array in self.arrays.values()), default=0)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name, including bfloat16 and float8."""
    return np.dtype(getattr(ml_dtypes, name, name))


def place_arrays(arrays: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, StoredArray]:
    """Place arrays, given as dtype and shape, one after another; their checksums are zeros.

    Arrays with larger elements come first, so that each array is aligned to its element size.
    """
    order = sorted(arrays, key=lambda key: -dtype_of(arrays[key][0]).itemsize)
    placed: dict[str, StoredArray] = {}
    start = 0
    for key in order:
        blank = StoredArray(*arrays[key], start, ())
        placed[key] = dataclasses.replace(blank, checksums=(0,) * -(-blank.nbytes // BLOCK))
        start = blank.stop
    return placed


def block_checksums(
    chunks: Iterable[memoryview], use: Callable[[memoryview], object] = lambda part: None
) -> tuple[int, ...]:
    """Return the CRC-32 of each block of the concatenated chunks.

    `use` takes each chunk after its checksums, while the processor's cache may have the chunk.
    """
    found: list[int] = []
    filled = value = 0
    for chunk in chunks:
        start = 0
        while start < len(chunk):
            part = chunk[start : start + BLOCK - filled]
            value, filled, start = zlib.crc32(part, value), filled + len(part), start + len(part)
            if filled == BLOCK:
                found.append(value)
                filled = value = 0
        use(chunk)
    return (*found, value) if filled else tuple(found)


def encode_header(header: ShardHeader) -> bytes:
    """Encode the beginning of the file: the length of the header, and the header."""
    about = json.dumps(
        {
            "version": VERSION,
            "configuration": header.configuration,
            "unit": header.unit,
            "rows": header.rows,
            "block_bytes": BLOCK,
            "arrays": {
                key: {
                    "dtype": array.dtype,
                    "shape": array.shape,
                    "start": array.start,
                    "crc32": "".join(f"{checksum:08x}" for checksum in array.checksums),
                }
                for key, array in header.arrays.items()
            },
            "numbers": header.numbers,
        },
        separators=(",", ":"),
        allow_nan=False,
    )
    entries: dict[str, Any] = {
        "__metadata__": {"tapax_shard": about, "crc32": f"{zlib.crc32(about.encode()):08x}"}
    }
    for key, array in header.arrays.items():
        entries[key] = _safetensors_entry(array.dtype, array.shape, array.start)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _safetensors_entry(dtype: str, shape: Sequence[int], start: int) -> dict[str, Any]:
    """Describe an array whose bytes begin at `start`, as readers of safetensors expect."""
    array = StoredArray(dtype, tuple(shape), start, ())
    return {
        "dtype": SAFETENSORS_TYPES[dtype],
        "shape": list(shape),
        "data_offsets": [array.start, array.stop],
    }


def decode_header(beginning: bytes, file_bytes: int, name: str) -> ShardHeader:
    """Decode the header of a shard, and check it and the length of the file.

    Args:
        beginning: The bytes of the file up to the end of the header, or further.
        file_bytes: The length of the file, in bytes.
        name: The name of the file in errors.
    """
    length = int.from_bytes(beginning[:8], "little")
    if len(beginning) < 8 + length or length > _LONGEST_HEADER:
        raise ShardError(f"The shard {name!r} is cut off in its header, or is not a shard.")
    entries: dict[str, Any] = {}
    try:
        entries = json.loads(beginning[8 : 8 + length])
        about, checksum = (entries["__metadata__"][key] for key in ("tapax_shard", "crc32"))
        is_intact = zlib.crc32(about.encode()) == int(checksum, 16)
        content = json.loads(about) if is_intact else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        is_intact, content = False, {}
    altered = ShardError(
        f"The header of the shard {name!r} was altered, or the file is not a shard."
    )
    if not is_intact:
        raise altered
    if content["version"] != VERSION or content["block_bytes"] != BLOCK:
        raise ShardError(
            f"The shard {name!r} is of version {content['version']} of the format, but this tapax "
            f"knows version {VERSION}. Use the version of tapax that wrote it."
        )
    arrays = {
        key: StoredArray(
            array["dtype"], tuple(array["shape"]), array["start"], _checksums(array["crc32"])
        )
        for key, array in content["arrays"].items()
    }
    # The checksum does not cover the entries that other readers of safetensors use.
    described = {key: _safetensors_entry(a.dtype, a.shape, a.start) for key, a in arrays.items()}
    if entries != {**described, "__metadata__": entries["__metadata__"]}:
        raise altered
    header = ShardHeader(
        content["configuration"],
        content["unit"],
        content["rows"],
        arrays,
        content["numbers"],
        8 + length,
    )
    if file_bytes != header.nbytes:
        raise ShardError(
            f"The shard {name!r} is not complete: it should have {header.nbytes} bytes, but "
            f"has {file_bytes}."
        )
    return header


def _checksums(text: str) -> tuple[int, ...]:
    return tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))


def row_key(name: str) -> str:
    """Return the key of the rows of a site or a column in a shard."""
    return f"rows/{name}"


def statistic_key(name: str, statistic: str) -> str:
    """Return the key of a statistic of a site in a shard, for a statistic that is an array."""
    return f"statistics/{name}/{statistic}"


def as_bytes(array: np.ndarray) -> memoryview:
    """Return a view of the bytes of an array, or of a copy if the array is not contiguous."""
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def check_storable(dtype: Any, what: str) -> str:
    """Return the name of a dtype, or raise for `what` if a shard cannot contain the dtype."""
    name = np.dtype(dtype).name
    if name not in SAFETENSORS_TYPES:
        known: Sequence[str] = list(SAFETENSORS_TYPES)
        raise TypeError(
            f"{what} is of type {name}, which a dataset cannot store. It can store "
            f"{', '.join(known)}."
        )
    return name
