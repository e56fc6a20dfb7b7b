"""Check that this commit can be released, build its distributions, and tag it.

    python scripts/release.py                check and build; change nothing in the repository
    python scripts/release.py --no-dry-run   check, build, and tag the commit as v<version>

The version is that in `tapax/__init__.py`. Before it builds, the script checks that

- the checkout is on `main`, without uncommitted changes, and the version has no tag yet;
- `CHANGELOG.md` has a section with that version and a date, and nothing in `[Unreleased]`;
- `CITATION.cff` has that version and that date.

`scripts/distributions.py` then builds and checks the sdist and the wheel, in `dist/`. At the end
the script prints the commands that publish them. It does not run these commands.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from typing import NamedTuple

from distributions import ROOT, BuildFailed, build, find_faults, read_version

BRANCH = "main"
SECTION = re.compile(r"^## \[([^\]]+)\](.*)$", re.MULTILINE)


class Section(NamedTuple):
    """A section of the changelog, with the rest of its heading and its text."""

    name: str
    heading: str
    text: str

    @property
    def has_entries(self) -> bool:
        return re.search(r"^- \S", self.text, re.MULTILINE) is not None


def split_changelog(changelog: str) -> list[Section]:
    """Split a changelog into its sections, newest first."""
    parts = SECTION.split(changelog)
    return [Section(*part) for part in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)]


def find_changelog_faults(changelog: str, version: str, today: datetime.date) -> list[str]:
    """Return a sentence for everything in the changelog that forbids a release of `version`."""
    found = split_changelog(changelog)
    sections = [section for section in found if section.name != "Unreleased"]
    faults = []
    if any(section.has_entries for section in found if section not in sections):
        faults.append(
            f"[Unreleased] in CHANGELOG.md has entries: move them into the section of {version}, "
            "or raise the version in tapax/__init__.py."
        )
    names = [section.name for section in sections]
    if version not in names:
        return [*faults, f"CHANGELOG.md has no section `## [{version}] - {today}`."]
    if names[0] != version:
        faults.append(f"CHANGELOG.md has the newer section [{names[0]}] above [{version}].")
    section = sections[names.index(version)]
    date = find_date(section)
    if date is None:
        faults.append(
            f"The heading of [{version}] in CHANGELOG.md has no date: write "
            f"`## [{version}] - {today}`."
        )
    elif date > today:
        faults.append(f"The date of [{version}] in CHANGELOG.md, {date}, is in the future.")
    if not section.has_entries:
        faults.append(f"[{version}] in CHANGELOG.md has no entries.")
    return faults


def find_date(section: Section) -> datetime.date | None:
    """Return the date in the heading of a section, or None if it has no valid date."""
    found = re.fullmatch(r" - (\d{4}-\d{2}-\d{2})\s*", section.heading)
    try:
        return datetime.date.fromisoformat(found[1]) if found else None
    except ValueError:
        return None


def find_citation_faults(citation: str, changelog: str, version: str) -> list[str]:
    """Return a sentence for each difference between CITATION.cff and the version to release."""
    faults = []
    found = dict(re.findall(r"^(version|date-released): \"?([^\"\n]+)\"?$", citation, re.MULTILINE))
    if found.get("version") != version:
        faults.append(f"CITATION.cff has the version {found.get('version')}, not {version}.")
    dates = [
        find_date(section) for section in split_changelog(changelog) if section.name == version
    ]
    if dates and dates[0] is not None and found.get("date-released") != str(dates[0]):
        faults.append(
            f"CITATION.cff has the date {found.get('date-released')}, but CHANGELOG.md {dates[0]}."
        )
    return faults


def find_checkout_faults(version: str) -> list[str]:
    """Return a sentence for everything in the git checkout that forbids a release."""
    faults = []
    branch = _git("rev-parse", "--abbrev-ref", "HEAD")
    if branch != BRANCH:
        faults.append(f"The checkout is on {branch}, but releases are made from {BRANCH}.")
    if _git("status", "--porcelain"):
        faults.append("The checkout has changes that are not committed: `git status` lists them.")
    if _git("tag", "--list", f"v{version}"):
        faults.append(f"The tag v{version} exists: raise the version in tapax/__init__.py.")
    return faults


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Check, build and tag a release.")
    parser.add_argument(
        "--dry-run",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="do not tag the commit; this is the default",
    )
    chosen = parser.parse_args()
    version = read_version()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    faults = [
        *find_checkout_faults(version),
        *find_changelog_faults(changelog, version, datetime.date.today()),
        *find_citation_faults(citation, changelog, version),
    ]
    try:
        built = build(ROOT / "dist")
        faults += find_faults(built)
    except BuildFailed as error:
        faults.append(str(error))
    if faults:
        print(f"tapax {version} cannot be released:", file=sys.stderr)
        print("\n".join(f"- {fault}" for fault in faults), file=sys.stderr)
        return 1
    if chosen.dry_run:
        print(f"tapax {version} can be released: `make release ARGS=--no-dry-run` tags it.")
        return 0
    _git("tag", "--annotate", f"v{version}", "--message", f"tapax {version}")
    print(f"Tagged v{version}. These commands publish it:")
    print(f"    git push origin v{version}    # .github/workflows/release.yml uploads to PyPI")
    print("    python -m twine upload dist/*    # or upload the files in dist/ by hand")
    return 0


if __name__ == "__main__":
    sys.exit(main())
