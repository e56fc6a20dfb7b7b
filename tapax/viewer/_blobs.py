"""Blobs: compressed arrays, texts and matrices, as `_format` specifies them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from tapax.viewer._format import EXACT_BYTES, MISSING, Codec, Column, Level, Matrix

TILE_ROWS = 256
TILE_COLUMNS = 1024
OVERVIEW_COLUMNS = 512
"""The largest number of columns of the coarse level of a matrix."""
LEAST_FACTOR = 16
"""The least factor of the coarse level of a quantised matrix; it adds at most a sixteenth."""
_DTYPES = {"f32": "<f4", "f64": "<f8", "i32": "<i4", "u8": "|u1"}
_RESERVED = 5
_TOP_CODE = 2**13 - 1 - _RESERVED
_SMALLEST = 1e-6
"""The fraction of its largest number down to which a row of both signs resolves numbers."""


class Blobs:
    """The blobs of a payload, numbered from `first` in the order in which they are added.

    `urgent` has the numbers of the blobs that the first view needs. A saved file has these first.
    """

    def __init__(self, first: int = 0):
        self.first = first
        self.urgent: set[int] = set()
        self._blobs: list[bytes] = []

    def __len__(self) -> int:
        return len(self._blobs)

    def __getitem__(self, number: int) -> bytes:
        return self._blobs[number - self.first]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return enumerate(self._blobs, self.first)

    def copy(self, count: int) -> Blobs:
        """Copy the first `count` blobs to a new object, to which blobs can be added."""
        copied = Blobs(self.first)
        copied._blobs = self._blobs[:count]
        copied.urgent = {number for number in self.urgent if number < self.first + count}
        return copied

    def add(self, content: bytes, *, urgent: bool = False, effort: int = 1) -> int:
        """Compress bytes into a new blob, and return its number."""
        number = self.first + len(self._blobs)
        compressor = zlib.compressobj(effort, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._blobs.append(compressor.compress(content) + compressor.flush())
        if urgent:
            self.urgent.add(number)
        return number

    def add_array(self, array: np.ndarray, dtype: str, *, urgent: bool = False) -> Column:
        """Add an array, converted to `dtype`, a dtype of columns."""
        content = np.ascontiguousarray(array, _DTYPES[dtype])
        shape = [int(n) for n in np.shape(array)]
        return {"blob": self.add(content.tobytes(), urgent=urgent), "dtype": dtype, "shape": shape}  # type: ignore[typeddict-item]

    def add_arrays(self, arrays: Sequence[np.ndarray], dtype: str) -> list[Column]:
        """Add small arrays that the page reads together, in one blob."""
        if not arrays:
            return []
        whole = self.add_array(np.concatenate([array.ravel() for array in arrays]), dtype)
        offsets = np.cumsum([0, *(array.size for array in arrays)])
        shapes = [[int(n) for n in array.shape] for array in arrays]
        return [
            {**whole, "shape": shape, "offset": int(offset)}
            for shape, offset in zip(shapes, offsets[:-1], strict=True)
        ]

    def add_text(self, text: str) -> Column:
        """Add a text."""
        content = text.encode("utf-8", "replace")
        return {"blob": self.add(content, effort=6), "dtype": "utf8", "shape": [len(content)]}

    def add_matrix(
        self, matrix: np.ndarray, sites: np.ndarray | None = None, *, exact: bool | None = None
    ) -> Matrix:
        """Add a float32 matrix [rows, steps], in which `MISSING` marks steps without a number.

        `sites` has the site of each row. The matrix is quantised unless `exact`, which is True by
        default for small matrices.
        """
        rows, columns = matrix.shape
        exact = matrix.nbytes <= EXACT_BYTES if exact is None else exact
        codec: Codec = "f32" if exact else "q13"
        factor = -(-columns // OVERVIEW_COLUMNS)
        if factor > 1 and not exact:
            factor = max(factor, LEAST_FACTOR)
        levels = [self._add_level(matrix, 1, codec, urgent=factor == 1)]
        if factor > 1:
            levels.append(self._add_level(summarise(matrix, factor), factor, codec, urgent=True))
        column = None if sites is None else self.add_array(sites, "i32", urgent=True)
        return {"sites": column, "rows": rows, "columns": columns, "levels": levels}

    def _add_level(self, matrix: np.ndarray, factor: int, codec: Codec, *, urgent: bool) -> Level:
        rows, columns = matrix.shape
        blob = self.first + len(self._blobs)
        encode = quantise if codec == "q13" else _as_floats
        for top in range(0, rows, TILE_ROWS):
            for left in range(0, columns, TILE_COLUMNS):
                tile = matrix[top : top + TILE_ROWS, left : left + TILE_COLUMNS]
                self.add(encode(tile), urgent=urgent)
        return {
            "factor": factor,
            "columns": columns,
            "codec": codec,
            "tileRows": TILE_ROWS,
            "tileColumns": TILE_COLUMNS,
            "blob": blob,
        }


def summarise(matrix: np.ndarray, factor: int) -> np.ndarray:
    """Reduce each group of `factor` columns to the number of largest magnitude in the group."""
    # Summarise some rows at a time, to use little memory compared with the matrix.
    tops = range(0, len(matrix), TILE_ROWS)
    return np.concatenate([_summarise(matrix[top : top + TILE_ROWS], factor) for top in tops])


def _summarise(matrix: np.ndarray, factor: int) -> np.ndarray:
    rows, columns = matrix.shape
    padding = -columns % factor
    padded = np.pad(matrix, ((0, 0), (0, padding)), constant_values=MISSING)
    groups = padded.reshape(rows, -1, factor)
    magnitudes = np.abs(groups)
    magnitudes[groups == np.float32(MISSING)] = -1
    # argmax returns the first NaN, if there is one.
    return np.take_along_axis(groups, magnitudes.argmax(-1)[..., None], -1)[..., 0]


def _as_floats(tile: np.ndarray) -> bytes:
    return np.ascontiguousarray(tile, "<f4").tobytes()


def quantise(tile: np.ndarray) -> bytes:
    """Encode a tile in the codec `q13`."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        finite = np.isfinite(tile) & (tile != np.float32(MISSING))
        numbers = np.where(finite, tile, 0).astype(np.float64)
        unit = _SMALLEST * np.abs(numbers).max(1, keepdims=True, initial=0)
        unit[(numbers >= 0).all(1)] = 0
        signed = unit > 0
        places = np.where(
            signed, np.arcsinh(numbers / np.where(signed, unit, 1)), np.log(np.abs(numbers))
        )
        used = finite & (tile != 0)
        low = np.where(used, places, np.inf).min(1, keepdims=True, initial=np.inf)
        high = np.where(used, places, -np.inf).max(1, keepdims=True, initial=-np.inf)
        low = np.where(np.isfinite(low), low, 0).astype(np.float32)
        step = np.where(np.isfinite(high), (high - low) / _TOP_CODE, 0).astype(np.float32)
        codes = np.rint((places - low) / np.where(step > 0, step, 1))
        codes = np.clip(np.where(used, codes, 0), 0, _TOP_CODE).astype(np.uint16) + _RESERVED
    codes[tile == 0] = 4
    codes[np.isnan(tile)] = 1
    codes[np.isposinf(tile)] = 2
    codes[np.isneginf(tile)] = 3
    codes[tile == np.float32(MISSING)] = 0
    parameters = np.concatenate([low, step, unit], 1).astype("<f4")
    low_bytes, high_bytes = (codes & 255).astype(np.uint8), (codes >> 8).astype(np.uint8)
    return parameters.tobytes() + low_bytes.tobytes() + high_bytes.tobytes()
