"""The command `tapax view PATH...`, which shows logs, taps and datasets in the browser.

    tapax view run.jsonl
    tapax view run.jsonl before.jsonl --port 8123
    tapax view taps.safetensors --save taps.html

The page follows a log that is still being written. The command runs until Ctrl-C; with `--save` it
writes one HTML file instead. The exit code is 0, or 2 if a path cannot be read or the port is
taken.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from tapax.viewer._browser import open_browser
from tapax.viewer._pending_payload import PendingPayload
from tapax.viewer._server import Server

if TYPE_CHECKING:
    from tapax.viewer._page import Page

HELP = "show logs, taps and datasets in the browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a log, saved taps, or a dataset")
    parser.add_argument("--save", metavar="FILE", help="write one HTML file, and open nothing")
    parser.add_argument(
        "--port", metavar="N", type=int, default=0, help="the port to listen on; default: any"
    )


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not 0 <= options.port < 2**16:
        parser.error(f"--port must be from 0 to 65535, but is {options.port}.")
    early: _EarlyServer | None = None
    try:
        if options.save is None and all(map(_begins_as_log, options.paths)):
            early = _serve_early(options.port)
        # These imports, and the log, take longer than the browser takes to load the page.
        from tapax.viewer._page import Page, make_payload

        payload = make_payload(*options.paths)
        if options.save is not None:
            Page(payload).save(options.save)
            return 0
        if early is None:
            page: Page | Server = Page(payload)
            _show(page.serve(options.port))
        else:
            page = early
            early.pending.set(payload)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if early is not None:
            early.close()
        parser.error(str(error))
    except KeyboardInterrupt:
        if early is None:
            raise
        early.close()
        return 0
    _wait(page)
    return 0


def _begins_as_log(path: str) -> bool:
    """Return whether a path is a log in JSON lines, as far as its first bytes tell."""
    try:
        with open(path, "rb") as file:
            return path.endswith(".jsonl") and file.read(10) == b'{"tapax": '
    except OSError:
        return False


class _EarlyServer(Server):
    """A server that starts before its payload is made."""

    def __init__(self, port: int):
        self.pending = PendingPayload()
        super().__init__(self.pending, port)


def _serve_early(port: int) -> _EarlyServer:
    server = _EarlyServer(port)
    _show(server.url)
    return server


def _show(address: str) -> None:
    open_browser(address)
    print(f"tapax shows the page at {address}", flush=True)
    print("Ctrl-C ends it.", file=sys.stderr, flush=True)


def _wait(page: Page | Server) -> None:
    try:
        while True:
            time.sleep(0.5)  # a signal just before a sleep does not end it
    except KeyboardInterrupt:
        pass
    finally:
        page.close()
