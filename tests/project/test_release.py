"""The checks of `scripts/release.py` reject a commit that is not ready for a release."""

import datetime

import pytest

TODAY = datetime.date(2026, 3, 2)
GOOD = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-03-01

### Added

- A function.

## [1.1.0] - 2026-01-01

- Another function.
"""


def find_faults(changelog, version="1.2.0"):
    from release import find_changelog_faults

    return find_changelog_faults(changelog, version, TODAY)


def test_a_dated_section_with_entries_can_be_released():
    assert find_faults(GOOD) == []
    assert find_faults(GOOD.replace("## [Unreleased]\n\n", "")) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("[1.2.0]", "[1.2.1]", "CHANGELOG.md has no section `## [1.2.0] - 2026-03-02`."),
        (
            " - 2026-03-01",
            "",
            "The heading of [1.2.0] in CHANGELOG.md has no date: write `## [1.2.0] - 2026-03-02`.",
        ),
        (
            "2026-03-01",
            "2026-02-30",
            "The heading of [1.2.0] in CHANGELOG.md has no date: write `## [1.2.0] - 2026-03-02`.",
        ),
        (
            "2026-03-01",
            "2026-03-09",
            "The date of [1.2.0] in CHANGELOG.md, 2026-03-09, is in the future.",
        ),
        ("- A function.", "Nothing.", "[1.2.0] in CHANGELOG.md has no entries."),
        (
            "## [Unreleased]",
            "## [Unreleased]\n\n- A later function.",
            "[Unreleased] in CHANGELOG.md has entries: move them into the section of 1.2.0, or "
            "raise the version in tapax/__init__.py.",
        ),
    ],
)
def test_a_changelog_that_is_not_ready_is_refused(old, new, fault):
    assert find_faults(GOOD.replace(old, new)) == [fault]


def test_an_older_version_is_refused():
    newer = "CHANGELOG.md has the newer section [1.2.0] above [1.1.0]."
    assert find_faults(GOOD, "1.1.0") == [newer]


def test_an_empty_changelog_is_refused():
    assert find_faults("") == ["CHANGELOG.md has no section `## [1.2.0] - 2026-03-02`."]


def test_the_citation_must_have_the_version_and_the_date():
    from release import find_citation_faults

    citation = "title: tapax\nversion: 1.2.0\ndate-released: 2026-03-01\n"
    assert find_citation_faults(citation, GOOD, "1.2.0") == []
    assert find_citation_faults(citation.replace("1.2.0", "1.1.0"), GOOD, "1.2.0") == [
        "CITATION.cff has the version 1.1.0, not 1.2.0."
    ]
    assert find_citation_faults(citation.replace("-01\n", "-02\n"), GOOD, "1.2.0") == [
        "CITATION.cff has the date 2026-03-02, but CHANGELOG.md 2026-03-01."
    ]


def test_a_branch_and_uncommitted_changes_are_refused(tmp_path, monkeypatch):
    import release

    answers = {"rev-parse": "feature", "status": " M tapax/__init__.py", "tag": "v1.2.0"}
    monkeypatch.setattr(release, "_git", lambda command, *_: answers[command])
    assert release.find_checkout_faults("1.2.0") == [
        "The checkout is on feature, but releases are made from main.",
        "The checkout has changes that are not committed: `git status` lists them.",
        "The tag v1.2.0 exists: raise the version in tapax/__init__.py.",
    ]
    answers.update({"rev-parse": "main", "status": "", "tag": ""})
    assert release.find_checkout_faults("1.2.0") == []


def test_a_dry_run_tags_nothing(tmp_path, monkeypatch, capsys):
    import release

    commands = []
    answers = {"rev-parse": "main"}
    for name in ("find_changelog_faults", "find_citation_faults", "find_faults"):
        monkeypatch.setattr(release, name, lambda *_: [])
    monkeypatch.setattr(release, "build", lambda out: out)
    monkeypatch.setattr(
        release, "_git", lambda *all: commands.append(all[0]) or answers.get(all[0], "")
    )
    monkeypatch.setattr("sys.argv", ["release.py"])
    assert release.main() == 0
    assert commands == ["rev-parse", "status", "tag"]  # this `tag` lists
    assert "can be released" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["release.py", "--no-dry-run"])
    assert release.main() == 0
    assert commands[-1] == "tag" and len(commands) == 7
    assert "twine upload dist/*" in capsys.readouterr().out
    monkeypatch.setattr(release, "find_faults", lambda built: ["The wheel lacks a file."])
    assert release.main() == 1
    assert "- The wheel lacks a file." in capsys.readouterr().err and len(commands) == 10
