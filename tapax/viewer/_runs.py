"""The payload of the log of a run: a matrix for each statistic, which records fill."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np

from tapax._results.flow import Flow
from tapax.monitoring._log import Log, flow_of_log
from tapax.monitoring._log_format import number_to_json
from tapax.monitoring._records import AlertEvent, Histogram, Number, Record, split_name
from tapax.monitoring._repeated_lines import NumberRecord
from tapax.monitoring._units import merge_units
from tapax.viewer._blobs import Blobs
from tapax.viewer._edges import make_edges
from tapax.viewer._format import (
    MISSING,
    Column,
    Event,
    JsonNumber,
    Message,
    Of,
    Statistic,
    Subject,
    empty_subject,
)
from tapax.viewer._format import Histogram as HistogramEntry
from tapax.viewer._matrices import GrowingMatrix, add_statistics, as_float32
from tapax.viewer._site_columns import SiteRow, Sources, make_site_columns

LINES = 256
"""The largest number of lines of a histogram over time; a line is a sum over several steps."""


_Group: TypeAlias = "tuple[tuple[Of, str], np.ndarray, np.ndarray]"
"""A kind and statistic, the places of its numbers in a record, and their rows in the matrix."""


class RunColumns:
    """The numbers of a run by statistic, site and step.

    As in a `Log`, a record replaces the records of its step and of later steps that share a name
    with it.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.sites: dict[str, int] = {}
        self.alerts: list[AlertEvent] = []
        self.flow: Flow | None = None
        self._matrices: dict[tuple[Of, str], GrowingMatrix] = {}
        self._row_sites: dict[tuple[Of, str], list[int]] = {}
        self._places: dict[str, tuple[tuple[Of, str], int]] = {}
        self._histograms: dict[tuple[Of, str, str], dict[int, Histogram]] = {}
        self._edges: dict[tuple[Of, str, str], np.ndarray] = {}
        self._has_other_edges = False
        self._layout: tuple[Sequence[str], list[_Group]] | None
        self._layout = None
        # The names of each record at each step; steps of a run share equal sequences of names.
        self._records: list[list[Sequence[str]]] = []
        self._known_names: dict[tuple[str, ...], tuple[str, ...]] = {}

    @property
    def rows(self) -> int:
        """The largest count of numbers in a step."""
        return sum(map(len, self._row_sites.values()))

    @property
    def has_histograms(self) -> bool:
        return bool(self._histograms)

    @classmethod
    def of_log(cls, log: Log) -> RunColumns:
        columns = cls()
        for step, record in log:
            columns.append(step, record)
        columns.alerts = list(log.alerts)
        columns.flow = flow_of_log(log)
        return columns

    def append(self, step: int, record: Record) -> int:
        """Add a record, and return the number of leading steps that are unchanged."""
        kept = len(self.steps)
        if self.steps and step <= self.steps[-1]:
            kept = self._replace_from(step, record)
        at = bisect.bisect_left(self.steps, step)
        if at == len(self.steps):
            self.steps.append(step)
            self._records.append([])
        elif self.steps[at] != step:
            self._insert(at, step)
        self._write(at, record)
        self._records[at].append(self._names_of(record))
        return min(kept, at)

    def _names_of(self, record: Record) -> Sequence[str]:
        """Return the names of a record that was just written, as the object known before."""
        if self._layout is not None:
            return self._layout[0]
        names = tuple(record)
        return self._known_names.setdefault(names, names)

    def _replace_from(self, step: int, record: Record) -> int:
        """Drop the records from `step` on that share a name with `record`."""
        first = bisect.bisect_left(self.steps, step)
        given, shared = frozenset(record), dict[int, bool]()

        def is_kept(names: Sequence[str]) -> bool:
            if id(names) not in shared:
                shared[id(names)] = not names or not given.isdisjoint(names)
            return not shared[id(names)]

        gone: list[int] = []
        for at in range(first, len(self.steps)):
            records = self._records[at]
            self._records[at] = [names for names in records if is_kept(names)]
            if not self._records[at]:
                gone.append(at)
                continue
            for names in records:
                if not is_kept(names):
                    self._clear(at, names)
        if gone:
            self._drop(gone)
        return first

    def _clear(self, at: int, names: Sequence[str]) -> None:
        """Remove the numbers of one of several records of a step."""
        for name in names:
            self._histograms.get(self._key(name), {}).pop(self.steps[at], None)
            if name in self._places:
                key, row = self._places[name]
                matrix = self._matrices[key]
                if at < matrix.columns:
                    matrix.numbers[row, at] = MISSING

    def _drop(self, gone: Sequence[int]) -> None:
        """Remove whole steps."""
        remaining = np.delete(np.arange(len(self.steps)), gone)
        for matrix in self._matrices.values():
            matrix.resize(matrix.rows, len(self.steps))
            numbers = matrix.numbers[:, remaining].copy()
            matrix.resize(matrix.rows, len(remaining))
            matrix.numbers[:] = numbers
        dropped = {self.steps[at] for at in gone}
        for by_step in self._histograms.values():
            for each in dropped & by_step.keys():
                del by_step[each]
        self.steps = [self.steps[at] for at in remaining]
        self._records = [self._records[at] for at in remaining]

    def _insert(self, at: int, step: int) -> None:
        self.steps.insert(at, step)
        self._records.insert(at, [])
        for matrix in self._matrices.values():
            matrix.resize(matrix.rows, len(self.steps))
            matrix.numbers[:, at + 1 :] = matrix.numbers[:, at:-1].copy()
            matrix.numbers[:, at] = MISSING

    def _key(self, name: str) -> tuple[Of, str, str]:
        site, of, stat = split_name(name)
        return cast(Of, of), stat, site

    def _write(self, at: int, record: Record) -> None:
        is_parsed = isinstance(record, NumberRecord)
        names = record.names if is_parsed else list(record)
        layout = self._layout
        if layout is not None and (names is layout[0] or names == layout[0]):
            if is_parsed:
                self._layout = names, layout[1]  # the next comparison is faster
            if is_parsed or all(type(number) is float for number in record.values()):
                self._write_columns(at, _as_array(record))
                return
        self._layout = None
        for name, number in record.items():
            self._write_number(at, name, number)
        if record and all(type(number) is float for number in record.values()):
            self._layout = names, self._group(names)

    def _write_columns(self, at: int, numbers: np.ndarray) -> None:
        assert self._layout is not None
        with np.errstate(over="ignore", under="ignore"):
            rounded = numbers.astype(np.float32)
        rounded[rounded == np.float32(MISSING)] = 0
        for key, places, rows in self._layout[1]:
            matrix = self._matrices[key]
            matrix.resize(matrix.rows, len(self.steps))
            matrix.numbers[rows, at] = rounded[places]

    def _group(self, names: Sequence[str]) -> list[_Group]:
        found: dict[tuple[Of, str], list[tuple[int, int]]] = {}
        for i, name in enumerate(names):
            key, row = self._places[name]
            found.setdefault(key, []).append((i, row))
        arrays = {key: np.array(pairs, np.intp) for key, pairs in found.items()}
        return [(key, pairs[:, 0], pairs[:, 1]) for key, pairs in arrays.items()]

    def _write_number(self, at: int, name: str, number: Number) -> None:
        of, stat, site = self._key(name)
        place = self.sites.setdefault(site, len(self.sites))
        merged = number if type(number) is float else merge_units(stat, number)
        if merged is None:
            return
        if isinstance(merged, Histogram):
            known = self._edges.setdefault((of, stat, site), merged.edges)
            self._has_other_edges |= not np.array_equal(known, merged.edges)
            self._histograms.setdefault((of, stat, site), {})[self.steps[at]] = merged
            return
        key = of, stat
        matrix = self._matrices.setdefault(key, GrowingMatrix())
        if name not in self._places:
            rows = self._row_sites.setdefault(key, [])
            self._places[name] = key, len(rows)
            rows.append(place)
        matrix.resize(len(self._row_sites[key]), len(self.steps))
        matrix.numbers[self._places[name][1], at] = as_float32(merged)

    def add_statistics(
        self, blobs: Blobs, since: int = 0, until: int | None = None
    ) -> list[Statistic]:
        """Add the matrices of all statistics, for the steps from place `since` to place `until`."""
        found: dict[tuple[Of, str], tuple[np.ndarray, np.ndarray]] = {}
        for key, matrix in self._matrices.items():
            matrix.resize(matrix.rows, len(self.steps))
            sites = np.array(self._row_sites[key], np.int32)
            order = np.argsort(sites, kind="stable")
            is_sorted = bool((order == np.arange(len(order))).all())
            numbers = matrix.numbers[:, since:until]
            found[key] = sites[order], numbers if is_sorted else numbers[order]
        return add_statistics(blobs, found, len(self.sites))

    def add_histograms(self, blobs: Blobs, since: int | None = None) -> list[HistogramEntry]:
        """Add the histograms over time, or only the histograms with a step from `since` on."""
        entries: list[HistogramEntry] = []
        known: dict[tuple[str, bytes], Column] = {}

        def add_once(array: np.ndarray) -> Column:
            # Most sites share their steps and edges.
            key = str(array.shape), array.astype(np.float64).tobytes()
            if key not in known:
                known[key] = blobs.add_array(array, "f64")
            return known[key]

        for (of, stat, site), by_step in self._histograms.items():
            if not by_step or (since is not None and max(by_step) < since):
                continue
            steps, counts, edges = _sum_lines(by_step)
            entries.append(
                {
                    "of": of,
                    "stat": stat,
                    "site": self.sites[site],
                    "steps": add_once(steps),
                    "edges": add_once(edges),
                    "counts": blobs.add_array(counts, "f32"),
                }
            )
        return entries

    def messages(self) -> list[Message]:
        """Return messages on what the page leaves out."""
        if not self._has_other_edges:
            return []
        text = (
            "The edges of some histograms change within the log. The page shows those with the "
            "edges of the last step."
        )
        return [{"level": "warning", "text": text}]

    def events(self) -> list[Event]:
        """Return the alerts that fired, as events."""
        return [
            {
                "kind": "alert",
                "step": event.step,
                "site": self.sites.get(event.site, -1),
                "siteName": event.site,
                "message": event.message,
                "stat": event.stat,
                "number": cast(JsonNumber, number_to_json(float(event.number))),
            }
            for event in self.alerts
        ]


def _as_array(record: Record) -> np.ndarray:
    if isinstance(record, NumberRecord):
        return record.numbers
    return np.fromiter(cast(Mapping[str, float], record).values(), np.float64, len(record))


def _sum_lines(by_step: Mapping[int, Histogram]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sum histograms into lines; return the first step and the counts of each line, and the edges.

    This omits histograms whose edges differ from the edges of the last step, because the page shows
    the current state of a run that has changed its edges.
    """
    last = by_step[max(by_step)].edges
    steps = [step for step in sorted(by_step) if np.array_equal(by_step[step].edges, last)]
    size = -(-len(steps) // LINES)
    counts = np.stack([by_step[step].counts for step in steps])
    starts = np.arange(0, len(steps), size)
    return np.array(steps)[starts], np.add.reduceat(counts, starts, axis=0), np.asarray(last)


def add_log(log: Log, name: str, blobs: Blobs, sources: Sources) -> Subject:
    """Make the subject of a log."""
    return add_run(RunColumns.of_log(log), name, blobs, sources)


def add_run(run: RunColumns, name: str, blobs: Blobs, sources: Sources) -> Subject:
    """Make the subject of a run with the steps so far."""
    subject = empty_subject("log", name)
    subject["sites"] = make_site_columns([SiteRow(site) for site in run.sites], sources)
    subject["steps"] = blobs.add_array(np.array(run.steps, np.float64), "f64", urgent=True)
    subject["statistics"] = run.add_statistics(blobs)
    subject["histograms"] = run.add_histograms(blobs)
    if run.flow is not None:
        subject |= make_edges(run.flow, list(run.sites))
    subject["events"] = run.events()
    subject["messages"] = run.messages()
    if not run.steps:
        text = "The log contains no records yet."
        subject["messages"] = [{"level": "info", "text": text}]
    return cast(Subject, subject)
