"""The payload of a page as its hosts read it, while the runs that it shows grow.

Blobs are only ever added: those of the header first, then those of each update. So a page reads any
blob that it was told of, however much came later.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from tapax.viewer._blobs import OVERVIEW_COLUMNS, Blobs
from tapax.viewer._followed_run import FollowedRun
from tapax.viewer._format import Header, Update

READ_SECONDS = 0.5
"""A host reads a log for this long before it sends what it has."""
KEPT_UPDATES = 256
"""A page that is further behind than this has to load the header again."""


class Payload:
    """The header, blobs and updates of a page. Any thread may call any method.

    `header` lacks the subjects with the numbers in `runs`, which are put in their places, and
    `blobs` are those of the other subjects, to which those of the runs are added. Updates are
    numbered from 1, for all runs together.
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
        """Whether there may be updates."""
        return bool(self._runs)

    def read_header(self) -> Header:
        """The header. The runs in it are not always as they are now: updates have the rest."""
        with self._lock:
            if self._is_old():
                self._header = self._add_runs()
            return self._header

    def _is_old(self) -> bool:
        """Whether a new header is worth its blobs: many updates, or most steps, came since."""
        return (
            self._must_reload
            or self._revision - self._added_revision > KEPT_UPDATES
            or any(
                run.steps > 2 * self._added_steps[number] + OVERVIEW_COLUMNS
                for number, run in self._runs.items()
            )
        )

    def read_blob(self, number: int) -> bytes | None:
        """A blob; None if there is none with this number. It does not wait while a log is read."""
        return self.blobs[number] if 0 <= number < len(self.blobs) else None

    def read_updates(self, after: int) -> Sequence[Update] | None:
        """Read on in the logs; the updates after that one, or None if some are forgotten."""
        with self._lock:
            for number, run in self._runs.items():
                run.read(READ_SECONDS)
                self._collect(number, run)
            forgotten = self._revision - len(self._updates)
            if not forgotten <= after <= self._revision:
                return None
            return self._updates[after - forgotten :]

    def read_blobs_of(self, update: Update) -> dict[int, bytes]:
        """The blobs that came with an update, by number."""
        with self._lock:
            first = self._first_blobs[update["revision"]]
            return {number: self.blobs[number] for number in range(first, update["blobs"])}

    def read_urgent_blobs(self) -> dict[int, bytes]:
        """The blobs that the first view of the header needs, by number."""
        with self._lock:
            return {number: self.blobs[number] for number in sorted(self.blobs.urgent)}

    def read_whole(self) -> tuple[Header, Blobs]:
        """Read all logs to their ends; a header and blobs that have nothing but the present."""
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
        """The header with the runs as they are now; pages that are open have updates instead."""
        subjects = list(self._header["subjects"])
        for number, run in self._runs.items():
            with run.lock:  # nothing may come between the last update and the subject
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
                # Steps that a page has at several levels were replaced: it has to begin anew.
                self._must_reload = True
                self._updates.clear()
        del self._updates[: -2 * KEPT_UPDATES]
