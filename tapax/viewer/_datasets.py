"""The payload of a dataset of activations: its columns, some rows, and the most active rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from tapax._sites import Site, wrong_type
from tapax.data._activations import Activations
from tapax.viewer._blobs import Blobs
from tapax.viewer._format import Context, DatasetColumn, Of, Subject, TopContexts, empty_subject
from tapax.viewer._matrices import add_statistics, as_float32
from tapax.viewer._site_columns import SiteRow, Sources, make_site_columns

SEARCHED_ROWS = 2**17
"""The number of rows among which the most active ones are searched."""
CHUNK_BYTES = 2**24
SAMPLE_ROWS = 64
TOPS = 16
"""The number of the most active rows that the page shows."""
AROUND = 10
"""The number of rows before and after a row that are its context."""

Directions = Mapping[str, tuple[str, Any]]
"""Directions by label: a site, and the number of a neuron or a vector."""
Decode = Callable[[int], str]


def add_dataset(
    dataset: Activations,
    name: str,
    blobs: Blobs,
    sources: Sources,
    directions: Directions | None = None,
    decode: Decode | None = None,
) -> Subject:
    """Make the subject of a dataset; `decode` converts an integer of the column `token` to text."""
    directions = _default_directions(dataset) if directions is None else _checked(directions)
    subject = empty_subject("activations", name)
    sites = [_make_row(dataset, site) for site in dataset.sites]
    subject["sites"] = make_site_columns(sites, sources)
    subject["statistics"] = _add_numbers(dataset, blobs)
    columns = [*dataset.columns, *dataset.sites]
    tops = [
        _find_top(dataset, label, site, direction, decode)
        for label, (site, direction) in directions.items()
    ]
    subject["dataset"] = {
        "rows": len(dataset),
        "columns": [_describe_column(dataset, column) for column in columns],
        "sample": _sample(dataset, columns, decode),
        "tops": tops,
    }
    texts: list[str] = []
    if not dataset.is_complete:
        texts.append(f"The dataset is not complete: {dataset.progress}.")
    if tops and len(dataset) > SEARCHED_ROWS:
        texts.append(f"The most active rows are those among the first {SEARCHED_ROWS:,}.")
    subject["messages"] = [{"level": "info", "text": text} for text in texts]
    return cast(Subject, subject)


def _checked(directions: Any) -> Directions:
    """Check that the argument `directions` maps labels to pairs of a site and a direction."""
    what = "`directions` takes a dict from a label to (site, neuron) or (site, vector), but"
    if not isinstance(directions, Mapping):
        raise wrong_type(f"{what} is", directions)
    for label, pair in directions.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise wrong_type(f"{what} for {label!r} is", pair)
    return {str(label): pair for label, pair in directions.items()}


def _make_row(dataset: Activations, name: str) -> SiteRow:
    array = dataset[name]
    nbytes = int(np.prod(array.shape, dtype=np.int64)) * array.dtype.itemsize
    return SiteRow(name, Site(name), (), tuple(array.shape[1:]), str(array.dtype), nbytes)


def _describe_column(dataset: Activations, name: str) -> DatasetColumn:
    array = dataset[name]
    return {"name": name, "dtype": str(array.dtype), "shape": [int(n) for n in array.shape[1:]]}


def _add_numbers(dataset: Activations, blobs: Blobs) -> list[Any]:
    """Add the statistics that `harvest` measured, as one number for each site."""
    numbers: dict[tuple[Of, str], dict[int, float]] = {}
    for i, name in enumerate(dataset.sites):
        if name not in dataset.stats:
            continue
        found, of = dataset.stats[name], cast(Of, "grad" if name.endswith(".grad") else "value")
        mean = np.asarray(found.mean, np.float64)
        variance = np.asarray(found.var, np.float64)
        for stat, number in {
            "rms": np.sqrt(np.mean(mean**2 + variance)) if mean.size else np.nan,
            "mean": mean.mean() if mean.size else np.nan,
            "norm": found.norm,
            "nonfinite": found.nonfinite,
        }.items():
            numbers.setdefault((of, stat), {})[i] = float(number)
    return add_statistics(
        blobs,
        {
            key: (
                np.array([*by_site], np.int32),
                np.array([[as_float32(number)] for number in by_site.values()], np.float32),
            )
            for key, by_site in numbers.items()
        },
        len(dataset.sites),
    )


def _default_directions(dataset: Activations) -> Directions:
    """Choose the neuron of largest variance of each site."""
    found: dict[str, tuple[str, Any]] = {}
    for name in dataset.sites:
        array = dataset[name]
        if len(array.shape) == 2 and array.shape[1] and name in dataset.stats:
            neuron = int(np.argmax(np.asarray(dataset.stats[name].var, np.float64)))
            found[f"{name}, neuron {neuron}"] = name, neuron
    return found


def _find_top(
    dataset: Activations, label: str, site: str, direction: Any, decode: Decode | None
) -> TopContexts:
    array = dataset[site]
    if len(array.shape) != 2:
        raise ValueError(
            f"The most active rows of {site!r} cannot be found: its rows have shape "
            f"{list(array.shape[1:])}, but a direction needs rows with one axis. Leave {label!r} "
            "out of `directions`."
        )
    project = _make_projection(site, array.shape[1], direction)
    rows = min(len(dataset), SEARCHED_ROWS)
    chunk = max(1, CHUNK_BYTES // max(1, array.dtype.itemsize * array.shape[1]))
    parts = [project(array[i : min(i + chunk, rows)]) for i in range(0, rows, chunk)]
    activations = np.concatenate(parts) if parts else np.zeros(0)
    usable = np.where(np.isfinite(activations), activations, -np.inf)
    order = np.argsort(-usable, kind="stable")[:TOPS]
    tokens, examples = _tokens_of(dataset, rows, decode), _examples_of(dataset, rows)
    gaps = _gaps_of(dataset, rows)
    contexts = [
        _make_context(int(row), activations, tokens, examples, gaps)
        for row in order
        if np.isfinite(usable[row])
    ]
    return {"label": label, "site": list(dataset.sites).index(site), "contexts": contexts}


def _make_projection(site: str, width: int, direction: Any) -> Callable[[Any], np.ndarray]:
    array = np.asarray(direction)
    if array.ndim == 0 and array.dtype.kind in "iu" and 0 <= array < width:
        return lambda rows: np.asarray(rows)[:, int(array)].astype(np.float64)
    if array.shape == (width,):
        vector = array.astype(np.float64)
        return lambda rows: np.asarray(rows).astype(np.float64) @ vector
    raise ValueError(
        f"A direction in {site!r} is the number of a neuron below {width}, or a vector of {width} "
        f"numbers, but was given an array of shape {list(array.shape)}, {str(direction)[:60]}."
    )


def _tokens_of(dataset: Activations, rows: int, decode: Decode | None) -> Callable[[int], str]:
    if "token" not in dataset.columns or len(dataset["token"].shape) != 1:
        return lambda row: f"row {row}"
    tokens = np.asarray(dataset["token"][:rows])
    return lambda row: decode(int(tokens[row])) if decode is not None else str(tokens[row])


def _examples_of(dataset: Activations, rows: int) -> np.ndarray:
    """Number the examples, and return the number of the example of each row."""
    # `beside` may have replaced a column by one with several numbers for each row.
    names = [name for name in ("batch", "example") if dataset[name].ndim == 1]
    pairs = np.array([np.asarray(dataset[name][:rows]) for name in names]).reshape(len(names), rows)
    return np.cumsum(np.any(np.diff(pairs, prepend=pairs[:, :1]) != 0, axis=0))


def _gaps_of(dataset: Activations, rows: int) -> np.ndarray:
    """Return, for each row, whether the harvest dropped rows between it and the row before it."""
    if "position" not in dataset.columns or dataset["position"].ndim != 1:
        return np.zeros(rows, bool)
    positions = np.asarray(dataset["position"][:rows])
    return np.diff(positions, prepend=positions[:1] - 1) != 1


def _make_context(
    row: int,
    activations: np.ndarray,
    token: Callable[[int], str],
    examples: np.ndarray,
    gaps: np.ndarray,
) -> Context:
    near = range(max(0, row - AROUND), min(len(activations), row + AROUND + 1))
    around = [i for i in near if examples[i] == examples[row]]
    return {
        "row": row,
        "activation": float(activations[row]),
        "tokens": [f"… {token(i)}" if gaps[i] and i > around[0] else token(i) for i in around],
        "activations": [_as_json(float(activations[i])) for i in around],
    }


def _as_json(number: float) -> float | str:
    """Write a number that JSON lacks as JavaScript names it."""
    if math.isnan(number):
        return "NaN"
    return number if math.isfinite(number) else f"{'-' if number < 0 else ''}Infinity"


def _sample(dataset: Activations, columns: Sequence[str], decode: Decode | None) -> Any:
    rows = min(len(dataset), SAMPLE_ROWS)
    arrays = {name: np.asarray(dataset[name][:rows]) for name in columns}
    token = _tokens_of(dataset, rows, decode)
    return {
        "row": list(range(rows)),
        "cells": [
            [
                token(i) if name == "token" and arrays[name].ndim == 1 else _show(arrays[name][i])
                for name in columns
            ]
            for i in range(rows)
        ],
    }


def _show(cell: Any) -> str:
    array = np.asarray(cell)
    if array.ndim == 0:
        return str(array.item())
    numbers = array.astype(np.float64).ravel()
    shown = ", ".join(f"{x:.3g}" for x in numbers[:4])
    return f"[{shown}{', ...' if numbers.size > 4 else ''}]"
