"""The payload of a page, which its hosts read while runs grow.

Blobs are only ever added: first the blobs of the header, then the blobs of each update. So a page
can always read the blobs that a header or an update named, however many came later.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from tapax.viewer._blobs import OVERVIEW_COLUMNS, Blobs
from tapax.viewer._followed_run import FollowedRun
from tapax.viewer._format import Header, Update

FIRST_SECONDS = 0.1
"""The time for which a log is read before the page first shows it."""
READ_SECONDS = 0.5
"""The time for which a host reads a log before it sends an update."""
KEPT_UPDATES = 256
"""The number of missed updates after which a page must reload the header."""


class Payload:
    """The header, blobs and updates of a page. Any thread may call any method.

    `header` and `blobs` describe all subjects except `runs`, whose subjects are empty. The payload
    fills these in, by number, and adds their blobs. The updates of all runs are numbered together,
    from 1.
    """

    def __init__(self, header: Header, blobs: Blobs, runs: Mapping[int, FollowedRun]):
        self._runs = runs
        self.blobs = blobs
        self._unchanging = len(blobs)
        self._lock = threading.RLock()
        self._updates: list[Update] = []
        self._revision = 0
        self._added_steps: dict[int, int] = {}
        self._first_blobs: dict[int, int] = {}
        self._header = header
        self._header = self._add_runs()

    @property
    def is_followed(self) -> bool:
        """True if updates may follow."""
        return bool(self._runs)

    def read_header(self) -> Header:
        """Return the header; its runs may lack steps, which updates contain."""
        with self._lock:
            if self._is_old():
                self._header = self._add_runs()
            return self._header

    def _is_old(self) -> bool:
        """Return whether a new header is worth its blobs.

        It is if the old header lacks many updates or most steps.
        """
        return (
            self._must_reload
            or self._revision - self._added_revision > KEPT_UPDATES
            or any(
                run.steps > 2 * self._added_steps[number] + OVERVIEW_COLUMNS
                for number, run in self._runs.items()
            )
        )

    def read_blob(self, number: int) -> bytes | None:
        """Return a blob, or None if no blob has this number; never wait for a log to be read."""
        return self.blobs[number] if 0 <= number < len(self.blobs) else None

    def read_updates(self, after: int) -> Sequence[Update] | None:
        """Read the logs, and return the updates after number `after`; None if some were dropped."""
        with self._lock:
            for number, run in self._runs.items():
                run.read(READ_SECONDS)
                self._collect(number, run)
            forgotten = self._revision - len(self._updates)
            if not forgotten <= after <= self._revision:
                return None
            return self._updates[after - forgotten :]

    def read_blobs_of(self, update: Update) -> dict[int, bytes]:
        """Return the blobs of an update, by number."""
        with self._lock:
            first = self._first_blobs[update["revision"]]
            return {number: self.blobs[number] for number in range(first, update["blobs"])}

    def read_urgent_blobs(self) -> dict[int, bytes]:
        """Return the blobs that the first view needs, by number."""
        with self._lock:
            return {number: self.blobs[number] for number in sorted(self.blobs.urgent)}

    def read_whole(self) -> tuple[Header, Blobs]:
        """Read all logs to the end, and return a header and blobs of the current state alone."""
        with self._lock:
            if not self._runs:
                return self._header, self.blobs
            blobs = self.blobs.copy(self._unchanging)
            subjects = list(self._header["subjects"])
            for number, run in self._runs.items():
                run.read()
                subjects[number] = run.add_subject(blobs)
            return {**self._header, "subjects": subjects, "blobs": len(blobs)}, blobs

    def _add_runs(self) -> Header:
        """Make a header with the current runs; pages that are open get updates instead."""
        subjects = list(self._header["subjects"])
        for number, run in self._runs.items():
            with run.lock:  # the subject must follow the last update directly
                if self._revision:
                    self._collect(number, run)
                subjects[number] = run.add_subject(self.blobs, self._revision)
                self._added_steps[number] = run.steps
        self._added_revision = self._revision
        self._must_reload = False
        return {**self._header, "subjects": subjects, "blobs": len(self.blobs)}

    def _collect(self, number: int, run: FollowedRun) -> None:
        while True:
            first = len(self.blobs)
            update = run.add_update(number, self._revision + 1, self.blobs)
            if update is None:
                break
            self._revision += 1
            self._first_blobs[self._revision] = first
            self._updates.append(update)
            if update["keep"] < self._added_steps[number] > OVERVIEW_COLUMNS:
                # The run replaced steps that a page has at several levels, so the page must reload.
                self._must_reload = True
                self._updates.clear()
        del self._updates[: -2 * KEPT_UPDATES]
