"""Make the manifest of a harvest from its arguments, without computing an activation."""

from __future__ import annotations

import dataclasses
import math
import platform
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._jax import PyTree, gather, spans_processes
from tapax._sites import Selection, SiteError, show, wrong_type
from tapax._walk.plan import Plan
from tapax.data._arguments import as_integer
from tapax.data._columns import Beside, Keep, make_columns, read_mask, spread_mask
from tapax.data._manifest import DatasetArray, Manifest
from tapax.data._row_layout import RowLayout
from tapax.data._row_program import ComputedRows, Description
from tapax.data._shard_format import check_storable, dtype_of


def make_manifest(
    described: Description,
    first: PyTree,
    *,
    plan: Plan,
    layout: RowLayout,
    keep: Keep,
    beside: Beside,
    dtype: str | None,
    shard_bytes: int,
    units: int | None,
    seed: int | None,
    batches: int | None,
    processes: int,
) -> Manifest:
    """Describe the dataset that a harvest will write; `first` is the first batch."""
    rows = described.rows
    whole = gather(first)
    columns = make_columns(whole, 0, rows.row_sizes, beside, is_transposed=layout.is_transposed)
    arrays = _describe_arrays(rows, columns)
    mask = read_mask(whole, keep)
    if mask is not None:
        spread_mask(mask, rows.row_sizes, np)  # raises if the mask does not fit
    configuration = {
        "values": _describe_selection(plan.values),
        "grads": _describe_selection(plan.grads),
        "rows": layout.rows if isinstance(layout.rows, str) else list(layout.rows),
        "layers": layout.layers,
        "dtype": dtype,
        "keep": None if mask is None else _checksum(mask),
        "beside": None if beside is None else _checksum(columns),
        "seed": seed,
        "batches": batches,
        "batches_per_unit": _batches_per_unit(arrays, rows, batches, shard_bytes, units),
        "processes": processes,
        "first_batch": _checksum(first),
        "weights": described.weights,
        "program": described.program,
    }
    return Manifest(configuration, arrays, _versions())


def _describe_selection(selection: Selection) -> str | None:
    """Describe a selection in words, with a checksum of the index arrays in it, if there are any.

    `show` names only the dtype and the shape of an index array, but its elements decide the rows.
    """
    if selection is None:
        return None
    arrays = list(_find_arrays(selection))
    text = show(selection)
    return f"{text} (checksum of its index arrays: {_checksum(arrays)})" if arrays else text


def _find_arrays(part: Any) -> Iterator[np.ndarray]:
    """Find the index arrays in a selection, or in a part of one."""
    if isinstance(part, np.ndarray):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _find_arrays(each)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _find_arrays(getattr(part, field.name))


def check_dtype(dtype: Any) -> str | None:
    """Check the argument `dtype` and return the name of the dtype."""
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        raise wrong_type("`dtype` takes a floating-point type, but is", dtype) from None
    check_storable(dtype_of(name), "`dtype`")
    if not jnp.issubdtype(dtype_of(name), jnp.floating):
        raise TypeError(f"`dtype` takes a floating-point type, but is {name}.")
    if jax.dtypes.canonicalize_dtype(dtype_of(name)) != dtype_of(name):
        raise TypeError(
            f"`dtype` is {name}, but JAX has 32 bits by default. Choose another type, or enable 64 "
            "bits: jax.config.update('jax_enable_x64', True)."
        )
    return name


def _describe_arrays(
    described: ComputedRows, columns: Mapping[str, np.ndarray]
) -> tuple[DatasetArray, ...]:
    sites = [
        DatasetArray(site.name, site.kind, site.dtype, site.shape, site.computed_dtype, site.source)
        for site in described.sites
    ]
    for name in columns:
        if any(site.name == name for site in sites):
            raise SiteError(
                f"A site and a column are both called {name!r}. Give the site, or the column of "
                "`beside`, another name; the names `batch`, `example`, `position` and `token` are "
                "those of columns."
            )
    for name, x in columns.items():
        sites.append(DatasetArray(name, "column", x.dtype.name, x.shape[1:], x.dtype.name))
    return tuple(sites)


def _batches_per_unit(
    arrays: tuple[DatasetArray, ...],
    described: ComputedRows,
    batches: int | None,
    shard_bytes: int,
    units: int | None,
) -> int:
    if units is not None:
        units = as_integer("units", units, 1)
        if batches is None:
            raise ValueError(
                "`units` divides a sequence of batches, but `batches` is an iterable, whose end is "
                "not known. Leave `units` out, or give a sequence."
            )
        return -(-batches // units)
    shard_bytes = as_integer("shard_bytes", shard_bytes, 1)
    row = sum(math.prod(array.shape) * dtype_of(array.dtype).itemsize for array in arrays)
    return max(1, shard_bytes // max(row * math.prod(described.row_sizes), 1))


def _checksum(batch: PyTree) -> str | None:
    """Return a checksum of a batch, or None if its arrays span processes."""
    leaves = jax.tree.leaves(batch)
    if any(spans_processes(x) for x in leaves):
        return None
    value = 0
    for x in leaves:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.ascontiguousarray(x)
        value = zlib.crc32(f"{x.dtype}{x.shape}".encode(), value)
        value = zlib.crc32(x.tobytes(), value) if x.dtype != object else value
    return f"{value:08x}"


def _versions() -> dict[str, str]:
    return {
        # An import of the package here would be circular.
        "tapax": sys.modules["tapax"].__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
