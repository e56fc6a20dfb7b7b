"""Build the site of the documentation into build/docs, and check it.

    python scripts/docs.py               build, executing every page; then check, also in a browser
    python scripts/docs.py --no-browser  build, and check only the files
    python scripts/docs.py --serve       build and serve; build again when a page or tapax changes
    python scripts/docs.py --links       also ask whether the addresses outside of the site answer

`make docs` and `make docs-serve` run it in the environment of `scripts/environment.py --docs`. The
outputs of pages are kept in build/docs-outputs until their code, or that of tapax, changes.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "docs"
SOURCES = ("docs", "tapax", "CHANGELOG.md", "README.md")


def build(builder: str = "html", *, strict: bool = True) -> bool:
    """Run Sphinx; return whether it succeeded, without a warning if `strict`."""
    command = [sys.executable, "-m", "sphinx", "-b", builder, "-j", "2", "--keep-going", "-q"]
    command += ["-W"] if strict else []
    command += ["-d", str(ROOT / "build" / "docs-doctrees"), str(ROOT / "docs")]
    folder = SITE if builder == "html" else ROOT / "build" / f"docs-{builder}"
    return subprocess.run([*command, str(folder)], cwd=ROOT, check=False).returncode == 0


def check(*, browser: bool) -> list[str]:
    """List the faults of the built site."""
    sys.path.insert(0, str(ROOT))
    from tests.docs import built_site

    faults = built_site.find_broken_links(SITE) + built_site.find_unlinked_pages(SITE)
    faults += built_site.find_missing_names(SITE)
    if browser and not faults:
        server = start_server(0)
        host, port = server.server_address[:2]
        faults += built_site.find_faults_in_chromium(SITE, f"http://{host}:{port}/")
        server.shutdown()
    return faults


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serve files without a line of log for each."""

    def log_message(self, format: str, *args: object) -> None:
        pass


class QuietServer(http.server.ThreadingHTTPServer):
    """Serve browsers that may leave a page before it is loaded."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


def start_server(port: int) -> QuietServer:
    """Serve the site to browsers on this machine."""
    handler = functools.partial(QuietHandler, directory=str(SITE))
    server = QuietServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def serve(port: int) -> None:
    """Serve the site, and build it when its sources change, until Ctrl-C."""
    build(strict=False)
    server = start_server(port)
    print(f"The site is at http://127.0.0.1:{server.server_address[1]}/", flush=True)
    known = dict(read_times())
    while True:
        time.sleep(1)
        times = dict(read_times())
        if times != known:
            known = times
            build(strict=False)
            print("Built.", flush=True)


def read_times() -> Iterator[tuple[Path, float]]:
    """Yield each source of the site, and when it was written."""
    for name in SOURCES:
        source = ROOT / name
        for path in source.rglob("*") if source.is_dir() else [source]:
            if path.suffix in (".md", ".py", ".css", ".svg") and path.is_file():
                yield path, path.stat().st_mtime


def main() -> int:
    parser = argparse.ArgumentParser(description="Build and check the documentation's site.")
    parser.add_argument("--serve", action="store_true", help="serve it, and build on changes")
    parser.add_argument("--port", type=int, default=8000, help="the port to serve on")
    parser.add_argument("--no-browser", action="store_true", help="check only the files")
    parser.add_argument("--links", action="store_true", help="check the links to other sites, too")
    chosen = parser.parse_args()
    if chosen.serve:
        try:
            serve(chosen.port)
        except KeyboardInterrupt:
            return 0
    start = time.monotonic()
    if not build():
        return 1
    built = time.monotonic()
    faults = check(browser=not chosen.no_browser)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        return 1
    print(f"Built {SITE.relative_to(ROOT)} in {built - start:.0f} s, ", end="")
    print(f"and checked it in {time.monotonic() - built:.0f} s.")
    return 0 if not chosen.links or build("linkcheck") else 1


if __name__ == "__main__":
    sys.exit(main())
