"""Make the environment in which a command runs, and print the path of its Python.

    python scripts/environment.py [--python 3.13 | --python newest] [--jax 0.12.0.1]
    python scripts/environment.py --demo
    python scripts/environment.py --lint
    python scripts/environment.py --peers
    python scripts/environment.py --jax-peers
    python scripts/environment.py --docs
    python scripts/environment.py --conformance
    python scripts/environment.py --conformance-oryx

An environment is a directory `.venv/<python>-<jax>`: tapax, editable, with the `test` dependency
group, at the versions of `constraints/jax-<jax>.txt`. Without arguments it is for the Python that
runs this script or, if that is not supported, for the newest Python found, with its newest jax.

The other environments have fixed names. `.venv/demo` contains only tapax and the packages of the
demo, `.venv/lint` the linters, `.venv/docs` tapax, Sphinx and the packages that the pages import.
For benchmarks, `.venv/peers` contains PyTorch libraries and `.venv/jax-peers` tapax and other JAX
libraries to compare. `.venv/conformance` and `.venv/conformance-oryx` contain the libraries that
`make conformance` judges.

The script rebuilds an environment from scratch if its Python, the constraints or the part of
`pyproject.toml` that says what to install has changed, or if the last build was interrupted.
Progress goes to stderr, so that a Makefile can read the path from stdout.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import page
from pythons import SUPPORTED, Python, default, find

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints"


class EnvironmentFailed(Exception):
    """An environment could not be made, for the reason in the message."""


def jax_versions(python: Python) -> list[str]:
    """Return the versions of jax tested on this Python, oldest first."""
    versions = []
    for path in CONSTRAINTS.glob("jax-[0-9]*.txt"):
        tested = re.search(r"^# tested on Python (.+)$", path.read_text(), re.MULTILINE)
        if tested is None:
            raise EnvironmentFailed(f"{path.name} has no line '# tested on Python ...'.")
        if python.name in tested[1].split(", "):
            versions.append(path.stem.removeprefix("jax-"))
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")])


def default_python() -> Python:
    """Return the Python that runs this script; if it is not supported, the newest that is."""
    python = default()
    if python is None:
        found = find()
        if not found:
            wanted = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
            raise EnvironmentFailed(
                f"No usable Python was found; tapax needs one of {wanted}, with its venv module."
            )
        python = found[max(found)]
    return python


def make(python: Python, jax: str) -> Path:
    """Build the environment for this combination, if needed; return its Python."""
    _build_page()
    constraints = CONSTRAINTS / f"jax-{jax}.txt"
    name = f"{python.name}-{jax}"
    return _make(name, python, constraints, _with_tapax(constraints, "test"))


def make_demo() -> Path:
    """Build the environment of the demo, which takes a minute, if needed; return its Python."""
    _build_page()
    python = default_python()
    constraints = CONSTRAINTS / f"jax-{jax_versions(python)[-1]}.txt"
    return _make("demo", python, constraints, _with_tapax(constraints, "demo"))


def make_lint() -> Path:
    """Build the environment with ruff, pyright, import-linter and pre-commit; return its Python."""
    return _make("lint", default_python(), CONSTRAINTS / "common.txt", ["--group", "lint"])


def make_peers() -> Path:
    """Build the environment with the PyTorch libraries of the benchmarks; return its Python."""
    return _make("peers", default_python(), CONSTRAINTS / "peers.txt", ["--group", "peers"])


def make_jax_peers() -> Path:
    """Build the environment with tapax and other JAX libraries to compare; return its Python."""
    python = max(find().items())[1]
    constraints = CONSTRAINTS / "jax-peers.txt"
    return _make("jax-peers", python, constraints, _with_tapax(constraints, "jax-peers"))


def make_conformance() -> Path:
    """Build the environment with tapax and the libraries that are judged; return its Python."""
    _build_page()
    constraints = CONSTRAINTS / "conformance.txt"
    what = _with_tapax(constraints, "conformance")
    return _make("conformance", default_python(), constraints, what)


def make_conformance_oryx() -> Path:
    """Build the environment with oryx and the last jax that oryx supports; return its Python."""
    python = min(find().items())[1]
    constraints = CONSTRAINTS / "conformance-oryx.txt"
    return _make("conformance-oryx", python, constraints, ["--group", "conformance-oryx"])


def make_docs() -> Path:
    """Build the environment that builds the documentation's site; return its Python."""
    _build_page()
    python = max(find().items())[1]
    constraints = CONSTRAINTS / f"jax-{jax_versions(python)[-1]}.txt"
    return _make("docs", python, constraints, _with_tapax(constraints, "docs"))


def _build_page() -> None:
    """Build the page of `tapax.view`: an editable installation reads it from the checkout."""
    try:
        page.build()
    except page.PageFailed as error:
        raise EnvironmentFailed(str(error)) from error


def _with_tapax(constraints: Path, group: str) -> list[str]:
    """Return the arguments of pip that install tapax, editable, and a dependency group."""
    return ["--build-constraint", str(constraints), "--editable", ".", "--group", group]


def _make(name: str, python: Python, constraints: Path, what: list[str]) -> Path:
    """Build `.venv/<name>` with the pip arguments `what`, if needed; return its Python."""
    folder = ROOT / ".venv" / name
    inner = folder / "bin" / "python"
    stamp = folder / "stamp"
    state = _state(python, constraints, what)
    folder.parent.mkdir(exist_ok=True)
    # Two commands at once must not both build the environment.
    with open(folder.with_name(f"{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == state and inner.exists():
            return inner
        print(f"Making {folder.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([python.path, "-m", "venv", str(folder)])
        pip = [str(inner), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        pip += ["--quiet", "--constraint", str(constraints)]
        # The pip that comes with Python 3.11 knows neither dependency groups nor build constraints.
        _run([*pip, "--upgrade", "pip"])
        _run([*pip, *what])
        stamp.write_text(state)
        return inner


def _state(python: Python, constraints: Path, what: list[str]) -> str:
    """Compute a digest of everything that decides what an environment contains."""
    install = (ROOT / "pyproject.toml").read_text().partition("\n[tool.")[0]
    pins = constraints.read_text() + (CONSTRAINTS / "common.txt").read_text()
    parts = [python.path, str(python.release), str(ROOT), *what, install, pins]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _run(command: list[str]) -> None:
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    try:
        subprocess.run(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise EnvironmentFailed(f"This command failed: {' '.join(command)}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description="Make an environment; print its Python.")
    parser.add_argument(
        "--python", metavar="3.N", help="a version, or newest; default: this Python"
    )
    parser.add_argument(
        "--jax", metavar="VERSION", help="default: the newest tested on that Python"
    )
    parser.add_argument("--demo", action="store_true", help="the environment of the demo")
    parser.add_argument("--lint", action="store_true", help="the environment of the linters")
    parser.add_argument("--peers", action="store_true", help="PyTorch libraries, for benchmarks")
    parser.add_argument(
        "--jax-peers", action="store_true", help="other JAX libraries, for benchmarks"
    )
    parser.add_argument(
        "--docs", action="store_true", help="the environment of the documentation's site"
    )
    parser.add_argument(
        "--conformance", action="store_true", help="other libraries, for conformance"
    )
    parser.add_argument("--conformance-oryx", action="store_true", help="oryx, for conformance")
    chosen = parser.parse_args()
    try:
        named = {
            "demo": make_demo,
            "lint": make_lint,
            "peers": make_peers,
            "jax_peers": make_jax_peers,
            "docs": make_docs,
            "conformance": make_conformance,
            "conformance_oryx": make_conformance_oryx,
        }
        for name, make_named in named.items():
            if getattr(chosen, name):
                print(make_named())
                return 0
        if chosen.python:
            found = {python.name: python for python in find().values()}
            if found and chosen.python == "newest":
                found["newest"] = list(found.values())[-1]
            if chosen.python not in found:
                names = ", ".join(found) or "none"
                raise EnvironmentFailed(
                    f"No usable Python {chosen.python} was found; found: {names}."
                )
            python = found[chosen.python]
        else:
            python = default_python()
        versions = jax_versions(python)
        jax = chosen.jax or versions[-1]
        if jax not in versions:
            raise EnvironmentFailed(
                f"jax {jax} is not tested on Python {python.name}; choose from {versions}."
            )
        print(make(python, jax))
    except EnvironmentFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
