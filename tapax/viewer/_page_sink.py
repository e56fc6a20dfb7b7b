"""The sink of `monitor(..., to="page")`, which shows the run in the browser or the notebook."""

from __future__ import annotations

from tapax._results.flow import Flow
from tapax.monitoring._records import AlertEvent, Record
from tapax.viewer import _browser
from tapax.viewer._followed_run import FollowedRun
from tapax.viewer._page import Page, make_page


class PageSink:
    """A sink that shows each record at once; the page stays open until the program ends."""

    def __init__(self) -> None:
        self._run = FollowedRun("run")
        self.page: Page = make_page(self._run)
        if _browser.is_notebook():
            from tapax.viewer._notebook import display_page

            display_page(self.page)
        else:
            self.page.open(waits=False)

    def __repr__(self) -> str:
        return "page"

    def __call__(self, step: int, record: Record) -> None:
        self._run.add_record(step, dict(record))

    def alert(self, event: AlertEvent) -> None:
        self._run.add_alert(event)

    def _write_flow(self, flow: Flow) -> None:
        self._run.set_flow(flow)

    def close(self) -> None:
        self._run.note({"level": "info", "text": "The run has ended."})
