"""Open a page in the browser, and keep a script alive while a browser shows its page."""

from __future__ import annotations

import os
import sys
import threading
import time
import webbrowser

from tapax.viewer._server import Server

OPEN_SECONDS = 0.2
"""The time before a page opens, within which `view(what).save(path)` cancels the opening."""
ARRIVAL_SECONDS = 20.0
LEAVING_SECONDS = 3.0
"""The times that a finished script waits: for a first browser, and after the last one left."""


def is_notebook() -> bool:
    """Return whether a Jupyter kernel runs this program."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class Opening(threading.Timer):
    """The opening of a served page in the browser after a moment, unless it is cancelled first.

    If it `waits`, a program that ends while a browser shows the page continues to serve it. The
    server runs already, because some Pythons start no thread once the program has ended.
    """

    def __init__(self, server: Server, waits: bool):
        super().__init__(OPEN_SECONDS, self._open)
        self.name = "tapax-browser"
        self.daemon = not waits
        self.has_begun = False
        self._server, self._waits = server, waits
        self.start()

    def _open(self) -> None:
        self.has_begun = True
        has_opened = open_browser(self._server.url)
        print(f"tapax shows the page at {self._server.url}", file=sys.stderr, flush=True)
        if has_opened and self._waits:
            _wait_for_readers(self._server)


def open_browser(url: str) -> bool:
    """Open an address in a graphical browser, and return whether one opened."""
    is_graphical = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    )
    try:
        return is_graphical and webbrowser.open(url)
    except webbrowser.Error:
        return False


def _wait_for_readers(server: Server) -> None:
    """Serve until the script has ended and no browser shows the page, then close the server."""
    began = time.monotonic()
    while not server.is_closed:
        if not threading.main_thread().is_alive():
            idle = server.idle_seconds()
            if idle is None and time.monotonic() - began > ARRIVAL_SECONDS:
                break
            if idle is not None and idle > LEAVING_SECONDS:
                break
        time.sleep(0.2)
    server.close()
