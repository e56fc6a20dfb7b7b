"""The command `tapax view PATH...`, which shows logs and taps in the browser.

    tapax view run.jsonl
    tapax view run.jsonl before.jsonl --port 8123
    tapax view taps.safetensors --save taps.html

The page follows a log that is still being written. The command runs until Ctrl-C; with `--save` it
writes one HTML file instead. The exit code is 0, or 2 if a path cannot be read or the port is
taken.
"""

import argparse
import sys
import time

from tapax.viewer._browser import open_browser
from tapax.viewer._page import Page, make_page

HELP = "show the log of a run, or taps, in the browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a log, or taps that were saved")
    parser.add_argument("--save", metavar="FILE", help="write one HTML file, and open nothing")
    parser.add_argument(
        "--port", metavar="N", type=int, default=0, help="the port to listen on; default: any"
    )


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not 0 <= options.port < 2**16:
        parser.error(f"--port must be from 0 to 65535, but is {options.port}.")
    try:
        page = make_page(*options.paths)
        if options.save is not None:
            page.save(options.save)
            return 0
        address = page.serve(options.port)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        parser.error(str(error))
    _wait(page, address)
    return 0


def _wait(page: Page, address: str) -> None:
    open_browser(address)
    print(f"tapax shows the page at {address}", flush=True)
    print("Ctrl-C ends it.", file=sys.stderr, flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass
    finally:
        page.close()
