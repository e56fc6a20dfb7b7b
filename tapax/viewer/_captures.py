"""The payload of taps, and of a table of sites.

A site in a scan has an entry for each iteration. An array that was captured whole gets statistics
and a histogram, and the payload has the array itself as far as `ARRAY_BYTES` allows. An array that
a reducer computed appears as its statistic.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from tapax._results import SiteTable, Taps
from tapax._results.flow import Flow
from tapax._results.iterations import Iteration, is_whole, split_iterations, split_statistic
from tapax._results.site_table import flow_of
from tapax._sites import Site
from tapax.monitoring._readings import split_statistics
from tapax.monitoring._records import Histogram
from tapax.monitoring._units import merge_units
from tapax.reduce import Reducer
from tapax.viewer._blobs import Blobs
from tapax.viewer._edges import make_edges
from tapax.viewer._format import ArrayEntry, Of, Subject, TokenGrid, empty_subject
from tapax.viewer._format import Histogram as HistogramEntry
from tapax.viewer._matrices import add_statistics, as_float32
from tapax.viewer._site_columns import SiteRow, Sources, make_site_columns
from tapax.viewer._statistics import count_bins, describe
from tapax.viewer._token_norms import add_token_norms

ARRAY_BYTES = 2**25
"""The largest size of the arrays of a capture in a payload, as float32."""

Tokens = Sequence[Sequence[str]]


def add_site_table(sites: SiteTable, name: str, blobs: Blobs, sources: Sources) -> Subject:
    """Make the subject of a table of sites: their dtypes and sources, without numbers."""
    rows = [row for site in sites for row in _rows_of_site(site)]
    unique = list({row.name: row for row in rows}.values())
    subject = empty_subject("sites", name)
    subject["sites"] = make_site_columns(unique, sources)
    subject |= _make_flow_fields(flow_of(sites), unique)
    if not unique:
        text = "The program has no sites."
        subject["messages"] = [{"level": "info", "text": text}]
    return cast(Subject, subject)


def _make_flow_fields(flow: Flow | None, rows: Sequence[SiteRow]) -> Mapping[str, Any]:
    return {} if flow is None else make_edges(flow, [row.name for row in rows])


def _rows_of_site(site: Site) -> list[SiteRow]:
    dtype = "" if site.dtype is None else str(site.dtype)
    sizes = [re.fullmatch(r"scan\[(\d+)\]", loop) for loop in site.loops]
    lengths = [int(size[1]) for size in itertools.takewhile(bool, sizes) if size]
    if tuple(site.shape[: len(lengths)]) != tuple(lengths):
        lengths = []
    count = int(np.prod(lengths, dtype=np.int64)) or 1
    shape = site.shape[len(lengths) :]
    return [
        SiteRow(
            f"{site.name}[{','.join(map(str, place))}]" if place else site.name,
            site,
            place,
            shape,
            dtype,
            site.nbytes // count,
            "while" in site.loops,
        )
        for place in itertools.product(*map(range, lengths))
    ]


def add_taps(
    taps: Taps, name: str, blobs: Blobs, sources: Sources, tokens: Tokens | None = None
) -> Subject:
    """Make the subject of taps; `tokens` has the text of each token, by example and position."""
    host = taps.to_host()
    reader = _TapsReader(host)
    reader.read()
    columns = make_site_columns(list(reader.rows.values()), sources)
    numbers = {row: i for i, row in enumerate(reader.rows)}
    subject = empty_subject("taps", name)
    subject["sites"] = columns
    subject |= _make_flow_fields(flow_of(taps.sites), list(reader.rows.values()))
    found: dict[tuple[Of, str], tuple[np.ndarray, np.ndarray]] = {}
    for key, by_row in reader.numbers.items():
        order = sorted(by_row, key=numbers.__getitem__)
        column = np.array([as_float32(by_row[row]) for row in order], np.float32)
        found[key] = np.array([numbers[row] for row in order], np.int32), column[:, None]
    subject["statistics"] = add_statistics(blobs, found, len(numbers))
    subject["histograms"] = reader.add_histograms(blobs, numbers)
    subject["arrays"] = reader.add_arrays(blobs, numbers)
    subject["tokens"], texts = _add_tokens(reader, blobs, numbers, tokens)
    if not reader.rows:
        texts = ["The capture returned no values and no gradients."]
    subject["messages"] = [{"level": "info", "text": text} for text in texts]
    return cast(Subject, subject)


def _add_tokens(
    reader: _TapsReader, blobs: Blobs, numbers: Mapping[str, int], tokens: Tokens | None
) -> tuple[list[TokenGrid], list[str]]:
    """Add the norms of tokens; return their grids, and sentences on what these leave out."""
    grids: list[TokenGrid] = []
    texts: dict[str, None] = {}
    for of in ("value", "grad"):
        arrays = {
            row: array for (kind, row), array in reader.arrays.items() if kind == of and array.ndim
        }
        found = add_token_norms(of, arrays, numbers, blobs, tokens)
        if found is not None:
            grid, rest = found
            grids.append(grid)
            texts |= {rest: None} if rest else {}
    return grids, list(texts)


class _TapsReader:
    """A reader of taps: collects rows, numbers, histograms and arrays."""

    def __init__(self, taps: Taps):
        self.taps = taps
        self.rows: dict[str, SiteRow] = {}
        self.numbers: dict[tuple[Of, str], dict[str, float]] = {}
        self.arrays: dict[tuple[str, str], np.ndarray] = {}
        self._histograms: dict[tuple[Of, str, str], tuple[np.ndarray, np.ndarray]] = {}

    def read(self) -> None:
        taps = self.taps
        sites = {site.name: site for site in taps.sites}
        for name in dict.fromkeys([*sites, *taps.values, *taps.grads]):
            for of, arrays in (("value", taps.values), ("grad", taps.grads)):
                if name in arrays:
                    site = sites.get(name, Site(name))
                    reducer = site.reducer if of == "value" else site.grad_reducer
                    lead = 0
                    if name in sites:
                        described = taps.values.get(name, arrays[name])
                        lead = max(0, described.ndim - len(site.shape))
                    self._read_site(cast(Of, of), site, reducer, arrays[name], lead)

    def _read_site(
        self, of: Of, site: Site, reducer: Reducer | None, array: Any, lead: int
    ) -> None:
        marked, stat = split_statistic(site, reducer)
        valid = self.taps.valid.get(site.name)
        if not isinstance(array, np.ndarray):  # random keys
            self._add_row(SiteRow(marked.name, marked, (), array.shape, str(array.dtype)))
            return
        for iteration in split_iterations(marked, array, valid, lead, "The page"):
            whole = is_whole(reducer)
            part = iteration.array
            self._add_row(
                SiteRow(
                    iteration.name,
                    marked,
                    iteration.place,
                    part.shape if whole else None,
                    str(array.dtype) if whole else "",
                    part.nbytes if whole else 0,
                    valid is not None,
                )
            )
            if not jax.numpy.issubdtype(array.dtype, np.number) and array.dtype != bool:
                continue
            if whole:
                self.arrays[of, iteration.name] = part
            if iteration.mask.any() and iteration.computed.size:
                self._read_numbers(of, stat, reducer if not whole else None, iteration)

    def _add_row(self, row: SiteRow) -> None:
        known = self.rows.get(row.name)
        if known is None or (known.shape is None and row.shape is not None):
            self.rows[row.name] = row

    def _read_numbers(
        self, of: Of, stat: str, reducer: Reducer | None, iteration: Iteration
    ) -> None:
        computed, row = iteration.computed, iteration.name
        if reducer is None:
            for name, number in describe(computed).items():
                self.numbers.setdefault((of, name), {})[row] = number
            counted = count_bins(computed)
            if counted is not None:
                self._histograms[of, "histogram", row] = counted
            return
        for name, number in split_statistics(reducer, stat, computed):
            merged = merge_units(name, number)
            if isinstance(merged, Histogram):
                self._histograms[of, name, row] = merged.counts, merged.edges
            elif merged is not None:
                self.numbers.setdefault((of, name), {})[row] = merged

    def add_histograms(self, blobs: Blobs, numbers: Mapping[str, int]) -> list[HistogramEntry]:
        found = self._histograms.values()
        counts = blobs.add_arrays([counts[None] for counts, _ in found], "f32")
        edges = blobs.add_arrays([edges for _, edges in found], "f64")
        return [
            {
                "of": of,
                "stat": stat,
                "site": numbers[row],
                "steps": None,
                "edges": edges[i],
                "counts": counts[i],
            }
            for i, (of, stat, row) in enumerate(self._histograms)
        ]

    def add_arrays(self, blobs: Blobs, numbers: Mapping[str, int]) -> list[ArrayEntry]:
        entries: list[ArrayEntry] = []
        left = ARRAY_BYTES
        for (of, row), array in self.arrays.items():
            entry: dict[str, Any] = {"site": numbers[row], "of": of, "shape": list(array.shape)}
            entry |= {"dtype": str(array.dtype), "data": None}
            if 4 * array.size <= left:
                left -= 4 * array.size
                real = np.abs(array) if np.iscomplexobj(array) else array
                with np.errstate(over="ignore"):
                    entry["data"] = blobs.add_array(real.astype(np.float32), "f32")
                    entry["rendering"] = _summarise(array)
            else:
                entry["omitted"] = (
                    f"The arrays of this page take {ARRAY_BYTES // 2**20} MiB at most, and this "
                    "one is beyond that. Select fewer sites: tapax.view(taps.select(...))."
                )
            entries.append(cast(ArrayEntry, entry))
        return entries


def _summarise(array: np.ndarray) -> str:
    """Render an array as text with treescope."""
    import treescope  # a page of a log does not need it

    with warnings.catch_warnings():
        # Treescope inspects every name of NumPy once, deprecated names included.
        warnings.simplefilter("ignore", DeprecationWarning)
        # NumPy warns about the mean of an array that has no finite elements.
        warnings.simplefilter("ignore", RuntimeWarning)
        return treescope.render_to_text(array)
