"""A run that the page follows: its numbers so far, and the changes since the last update."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tapax._results.flow import Flow
from tapax.monitoring._log_tail import LogTail
from tapax.monitoring._records import AlertEvent, Record
from tapax.viewer._blobs import OVERVIEW_COLUMNS, Blobs
from tapax.viewer._edges import make_edges
from tapax.viewer._format import (
    EXACT_BYTES,
    FORMAT,
    VERSION,
    Histogram,
    Message,
    SiteColumns,
    Subject,
    Update,
)
from tapax.viewer._runs import RunColumns, add_run
from tapax.viewer._site_columns import SiteRow, Sources, make_site_columns

HISTOGRAM_SECONDS = 5.0
"""The least time between two updates with histograms, which are always sent whole."""


class FollowedRun:
    """The numbers of a run that is still being written.

    The numbers come from `tail`, which `read` reads up to the end of the log; if `tail` is None,
    they come from `add_record` and `add_alert`. Any thread may call any method. A thread that calls
    several methods may acquire the `lock`.
    """

    def __init__(self, name: str, tail: LogTail | None = None):
        self.name = name
        self._tail = tail
        self.lock = threading.RLock()
        self._columns = RunColumns()
        self._note: Message | None = None
        # The page has this many steps and sites; the first `_right` steps are still correct.
        self._told_steps = self._told_sites = self._right = 0
        self._told_rest: tuple[int, list[Message]] = 0, []
        self._told_flow: Flow | None = None
        self._changed_histograms: int | None = None
        self._histograms_at = 0.0

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return len(self._columns.steps)

    def add_record(self, step: int, record: Record) -> None:
        """Add the record of a step."""
        with self.lock:
            self._right = min(self._right, self._columns.append(step, record))
            changed = self._changed_histograms
            self._changed_histograms = step if changed is None else min(step, changed)

    def add_alert(self, event: AlertEvent) -> None:
        """Add an alert that fired."""
        with self.lock:
            self._columns.alerts.append(event)

    def set_flow(self, flow: Flow) -> None:
        """Set the flow of data between the sites of the run."""
        with self.lock:
            self._columns.flow = flow

    def note(self, message: Message) -> None:
        """Show a message after the messages on the log; it replaces the last note."""
        with self.lock:
            self._note = message

    def read(self, seconds: float = float("inf")) -> None:
        """Read the new part of the log, for about `seconds` seconds."""
        if self._tail is None:
            return
        with self.lock:
            if self._tail.was_replaced():
                self._forget()
            for entry in self._tail.read(seconds):
                if isinstance(entry, AlertEvent):
                    self.add_alert(entry)
                elif isinstance(entry, Flow):
                    self.set_flow(entry)
                else:
                    self.add_record(*entry)

    def _forget(self) -> None:
        """Drop all steps. The sites keep their numbers, because the page keeps the sites."""
        sites = self._columns.sites
        self._columns = RunColumns()
        self._columns.sites = sites
        self._right = 0

    def raise_if_unreadable(self) -> None:
        """Raise the error of a path whose content turned out not to be a log."""
        if self._tail is not None and isinstance(self._tail.error, ValueError) and not self.steps:
            raise self._tail.error

    def _messages(self) -> list[Message]:
        found: list[Message] = []
        if self._tail is not None:
            level = "warning" if self._tail.error is None else "error"
            found = [{"level": level, "text": text} for text in self._tail.messages]
            if not self._tail.is_at_end:
                found.append({"level": "info", "text": "The log is still being read."})
        found += self._columns.messages()
        if self._note is not None:
            found.append(self._note)
        if not found and not self.steps:
            found = [{"level": "info", "text": "The log contains no records yet."}]
        return found

    def add_subject(self, blobs: Blobs, revision: int | None = None) -> Subject:
        """Make the subject of the run with the steps so far.

        If `revision` is given, later updates contain the changes since this subject.
        """
        with self.lock:
            subject = add_run(self._columns, self.name, blobs, Sources(blobs))
            subject["messages"] = self._messages()
            if revision is not None:
                subject["revision"] = revision
                self._told_steps = self._right = self.steps
                self._told_sites = len(self._columns.sites)
                self._told_flow = self._columns.flow
                self._told_rest = len(self._columns.alerts), self._messages()
                self._changed_histograms = None
            return subject

    def add_update(self, subject: int, revision: int, blobs: Blobs) -> Update | None:
        """Make the next update of the page, or return None if nothing has changed.

        An update has so few steps that their numbers are exact and in one level; the next update
        has the rest.
        """
        with self.lock:
            keep, rest = self._right, (len(self._columns.alerts), self._messages())
            has_histograms = self._are_histograms_due()
            is_same = keep == self.steps == self._told_steps
            flow = self._columns.flow
            has_edges = flow is not None and (
                flow is not self._told_flow or self._told_sites < len(self._columns.sites)
            )
            if is_same and rest == self._told_rest and not has_histograms and not has_edges:
                return None
            until = min(self.steps, keep + self._most_columns())
            update: Update = {
                "format": FORMAT,
                "version": VERSION,
                "subject": subject,
                "revision": revision,
                "keep": keep,
                "sites": self._take_new_sites(),
                "steps": self._columns.steps[keep:until],
                "statistics": [] if is_same else self._columns.add_statistics(blobs, keep, until),
                "histograms": self._take_histograms(blobs) if has_histograms else [],
                "events": self._columns.events(),
                "messages": rest[1],
                "blobs": len(blobs),
            }
            self._told_steps = self._right = until
            self._told_rest = rest
            if has_edges and flow is not None:
                found = make_edges(flow, list(self._columns.sites))
                update["edges"], update["limited"] = found["edges"], found["limited"]
                self._told_flow = flow
            return update

    def _most_columns(self) -> int:
        numbers = max(1, self._columns.rows)
        return max(1, min(OVERVIEW_COLUMNS, EXACT_BYTES // (4 * numbers)))

    def _are_histograms_due(self) -> bool:
        return (
            self._changed_histograms is not None
            and self._columns.has_histograms
            and time.monotonic() - self._histograms_at > HISTOGRAM_SECONDS
        )

    def _take_histograms(self, blobs: Blobs) -> Sequence[Histogram]:
        found = self._columns.add_histograms(blobs, self._changed_histograms)
        self._changed_histograms = None
        self._histograms_at = time.monotonic()
        return found

    def _take_new_sites(self) -> SiteColumns:
        """Return the columns of the sites that the page lacks, placed among all sites."""
        first, self._told_sites = self._told_sites, len(self._columns.sites)
        if first == self._told_sites:
            return {"name": [], "path": [], "role": [], "stack": [], "depth": []}
        columns = make_site_columns(
            [SiteRow(site) for site in self._columns.sites], Sources(Blobs())
        )
        known = cast(Mapping[str, Sequence[Any]], columns)
        return cast(SiteColumns, {name: column[first:] for name, column in known.items()})
