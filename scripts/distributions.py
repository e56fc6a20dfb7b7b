"""Build the sdist and the wheel of tapax, and check what is in them.

    python scripts/distributions.py [--out dist]

The Python that runs this script must have `build` and `hatchling`; nothing is downloaded. The wheel
is built from the sdist, as pip does. The checks read the files and their metadata:

- the wheel contains the package, `py.typed`, the built page and the license, and nothing else;
- the sdist contains the sources of the page, the tests and the scripts;
- the version is that of `tapax/__init__.py`, and the `tapax` command is declared;
- every extra is declared, and every classifier exists;
- the description, which PyPI shows, has no relative link or image.

The script prints the faults that it finds, and exits with status 1 if there are any.
"""

from __future__ import annotations

import argparse
import email
import email.message
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 5_000_000
"""The largest size of a wheel. The built page takes most of it."""

IN_WHEEL = (
    "tapax/__init__.py",
    "tapax/__main__.py",
    "tapax/py.typed",
    "tapax/viewer/assets/page.js",
)
IN_SDIST = (
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "constraints/common.txt",
    "pyproject.toml",
    "scripts/page.py",
    "scripts/wheel_hook.py",
    "tapax/__init__.py",
    "tapax/viewer/assets/page.js",
    "tests/conftest.py",
    "web/build.mjs",
    "web/package-lock.json",
)
RELATIVE_LINK = re.compile(r"\]\((?!https://|#|mailto:)([^)\s]+)|src=\"(?!https://)([^\"]+)")


class Distributions(NamedTuple):
    sdist: Path
    wheel: Path


class BuildFailed(Exception):
    """The distributions could not be built, for the reason in the message."""


def read_version(root: Path = ROOT) -> str:
    """Return the version in `tapax/__init__.py`, without importing the package."""
    text = (root / "tapax" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise BuildFailed('tapax/__init__.py has no line `__version__ = "..."`.')
    return found[1]


def build(out: Path) -> Distributions:
    """Build the sdist, and the wheel from it, in the folder `out`, which is emptied first."""
    shutil.rmtree(out, ignore_errors=True)
    # Without isolation nothing is downloaded. The hook's requirement, Node from PyPI, is for
    # machines without Node; `scripts/page.py` finds one in `.venv/lint` there.
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    done = subprocess.run(
        [*command, "--outdir", str(out), str(ROOT)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sdists, wheels = list(out.glob("*.tar.gz")), list(out.glob("*.whl"))
    if done.returncode or len(sdists) != 1 or len(wheels) != 1:
        raise BuildFailed(f"`python -m build` failed:\n{done.stdout}")
    return Distributions(sdists[0], wheels[0])


def find_faults(built: Distributions) -> list[str]:
    """Return a sentence for everything that is wrong with the sdist and the wheel."""
    return [*find_wheel_faults(built.wheel), *find_sdist_faults(built.sdist)]


def find_wheel_faults(wheel: Path) -> list[str]:
    """Return a sentence for everything that is wrong with the wheel."""
    version = read_version()
    info = f"tapax-{version}.dist-info"
    if wheel.name != f"tapax-{version}-py3-none-any.whl":
        return [f"The wheel is named {wheel.name}, but the version of tapax is {version}."]
    faults = []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        wanted = (*IN_WHEEL, f"{info}/licenses/LICENSE", f"{info}/entry_points.txt")
        missing = sorted(set(wanted) - names)
        faults += [f"The wheel lacks {name}." for name in missing]
        known = re.compile(rf"tapax/(.*\.py|py\.typed|viewer/assets/.*)|{re.escape(info)}/.*")
        faults += [f"The wheel contains {n}." for n in sorted(names) if not known.fullmatch(n)]
        if missing:
            return faults
        commands = archive.read(f"{info}/entry_points.txt").decode()
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    if "tapax = tapax.__main__:main" not in commands:
        faults.append("The wheel does not declare the command `tapax`.")
    if wheel.stat().st_size > MOST_BYTES:
        faults.append(f"The wheel has {wheel.stat().st_size} bytes, more than {MOST_BYTES}.")
    return faults + find_metadata_faults(metadata)


def find_metadata_faults(metadata: email.message.Message) -> list[str]:
    """Return a sentence for everything in the metadata that PyPI refuses or shows wrongly."""
    faults = []
    if metadata["Version"] != read_version():
        faults.append(f"The metadata have the version {metadata['Version']}.")
    if metadata["License-Expression"] != "Apache-2.0":
        faults.append(f"The license in the metadata is {metadata['License-Expression']}.")
    if metadata["Description-Content-Type"] != "text/markdown":
        faults.append("The description is not declared as Markdown.")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(metadata.get_all("Provides-Extra", []))
    if extras != set(declared["optional-dependencies"]):
        faults.append(f"The metadata have the extras {sorted(extras)}.")
    faults += _find_unknown_classifiers(metadata.get_all("Classifier", []))
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    if urls != declared["urls"]:
        faults.append(f"The metadata have the project URLs {urls}.")
    description = str(metadata.get_payload())
    if not description.startswith("# tapax"):
        faults.append("The description does not start with the title of README.md.")
    for link in find_relative_links(description):
        faults.append(
            f"README.md links to {link}, which PyPI cannot resolve: use an https address."
        )
    return faults


def find_relative_links(markdown: str) -> list[str]:
    """Return the targets of links and images that are neither an https address nor a heading."""
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return [link or image for link, image in RELATIVE_LINK.findall(text)]


def find_sdist_faults(sdist: Path) -> list[str]:
    """Return a sentence for everything that is wrong with the sdist."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    faults = [f"The sdist lacks {name}." for name in IN_SDIST if name not in names]
    unwanted = re.compile(r"(.*/)?(node_modules|__pycache__|\.venv|\.git)/.*")
    return faults + [f"The sdist contains {n}." for n in sorted(names) if unwanted.fullmatch(n)]


def _find_unknown_classifiers(classifiers: list[str]) -> list[str]:
    import trove_classifiers  # pyright: ignore[reportMissingImports]  (hatchling requires it)

    known = trove_classifiers.classifiers
    return [f"PyPI has no classifier {name!r}." for name in classifiers if name not in known]


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the sdist and the wheel; check them.")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="the folder; dist if absent"
    )
    chosen = parser.parse_args()
    try:
        built = build(chosen.out)
        faults = find_faults(built)
    except BuildFailed as error:
        print(error, file=sys.stderr)
        return 1
    for fault in faults:
        print(fault, file=sys.stderr)
    print("\n".join(map(str, built)))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
