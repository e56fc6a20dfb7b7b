"""Find the Pythons of this machine that can build an environment for tapax.

`python scripts/pythons.py` prints a line for each supported minor version, with its interpreter or
"not found". A candidate counts only if it runs, is a CPython with the GIL, and has `venv`,
`ensurepip` and the modules that pip needs. Otherwise, as for a pyenv shim of a version that is not
selected or a Debian Python without its venv package, the script tries the next candidate.

Candidates, in order: the interpreter that runs this script, every directory of PATH, pyenv, uv, and
the conventional prefixes. Within pyenv and uv the newest patch release comes first.
"""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SUPPORTED = tuple((3, minor) for minor in (11, 12, 13, 14))

_PROBE = """
import ctypes, ensurepip, json, ssl, sys, sysconfig, venv, zlib
ensurepip.version()
usable = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(json.dumps([usable, sys.executable, list(sys.version_info[:3])]))
"""


class Python(NamedTuple):
    """An interpreter: the path of its executable and its release, such as (3, 13, 0)."""

    path: str
    release: tuple[int, int, int]

    @property
    def minor(self) -> tuple[int, int]:
        return self.release[:2]

    @property
    def name(self) -> str:
        return f"{self.release[0]}.{self.release[1]}"


def probe(command: str) -> Python | None:
    """Return the Python that `command` starts, or None if it cannot build an environment."""
    try:
        answer = subprocess.run(
            [command, "-I", "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        usable, path, release = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Python(path, tuple(release)) if usable and path else None


def _natural(path: str) -> list[int]:
    """Return the numbers in a path, so that 3.13.10 sorts after 3.13.9."""
    return [int(number) for number in re.findall(r"\d+", path)]


def _candidates(name: str) -> Iterator[str]:
    """Yield paths that may be a Python of minor version `name`, such as "3.12", best first."""
    home = Path.home()
    pyenv = os.environ.get("PYENV_ROOT") or home / ".pyenv"
    data = os.environ.get("XDG_DATA_HOME") or home / ".local" / "share"
    uv = os.environ.get("UV_PYTHON_INSTALL_DIR") or Path(data, "uv", "python")

    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        yield os.path.join(folder, f"python{name}")
        yield os.path.join(folder, "python3")
    for root in (pyenv, uv):
        pattern = f"versions/{name}*/bin/python" if root == pyenv else f"*-{name}*/bin/python3"
        yield from sorted(glob.glob(os.path.join(root, pattern)), key=_natural, reverse=True)
    for pattern in (
        "/usr/bin",
        "/usr/local/bin",
        "/opt/bin",
        "/opt/*/bin",
        "/opt/*/*/bin",
        "/Library/Frameworks/Python.framework/Versions/*/bin",
    ):
        yield from sorted(glob.glob(f"{pattern}/python{name}"))


def default() -> Python | None:
    """Return the interpreter that runs this script, if it is supported."""
    python = probe(sys.executable)
    return python if python and python.minor in SUPPORTED else None


def find() -> dict[tuple[int, int], Python]:
    """Find a Python for each supported minor version, oldest first."""
    found: dict[tuple[int, int], Python] = {}
    seen: dict[str, Python | None] = {}
    here = default()
    for minor in SUPPORTED:
        if here and here.minor == minor:
            found[minor] = here
            continue
        for candidate in _candidates(f"{minor[0]}.{minor[1]}"):
            if candidate not in seen:
                seen[candidate] = probe(candidate) if os.access(candidate, os.X_OK) else None
            python = seen[candidate]
            if python and python.minor == minor:
                found[minor] = python
                break
    return found


def main() -> int:
    found = find()
    for minor in SUPPORTED:
        python = found.get(minor)
        name = f"{minor[0]}.{minor[1]}"
        if python:
            print(f"{name:<6}{'.'.join(map(str, python.release)):<9}{python.path}")
        else:
            print(f"{name:<6}not found")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
