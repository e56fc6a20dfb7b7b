"""The table of `docs/conformance.md` has every case, and tapax is right in each of some."""

import re
from pathlib import Path

import pytest

from conformance.columns import COLUMNS, NONE
from conformance.problem import CASES

pytestmark = pytest.mark.once

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
OURS = [name for name in COLUMNS if name.startswith("tapax")]
SOME = ["train", "jit/ran", "vmap/own", "scan/closed", "remat/argument", "stack/raw"]
SOME += ["while_loop/closed", "twice", "nested", "exception", "unknown"]


@pytest.mark.parametrize("column", OURS)
@pytest.mark.parametrize("case", [c for c in CASES if c.name in SOME], ids=lambda case: case.name)
def test_tapax_is_right(case, column):
    value, gradient = COLUMNS[column](case)
    assert not value.bad, value.why
    assert not gradient.bad, gradient.why
    assert value != NONE or case.name in ("remat/argument", "stack/raw")


def test_every_reason_is_told():
    """What the table calls wrong is said to be so: a result of another shape, type or number."""
    (case,) = (case for case in CASES if case.name == "twice")
    _, gradient = COLUMNS["Flax Linen"](case)
    assert (gradient.mark, gradient.why) == ("silently wrong", "1 gradient instead of 2, summed")


def tables():
    """The tables of values and of gradients: their heads, and their rows by case."""
    for name in ("Values", "Gradients"):
        text = re.search(rf"## {name}\n\n(.*?)\n\n", DOCUMENT.read_text(), re.DOTALL)[1]
        head, _, *rows = ([c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines())
        yield head, {row[0]: row[1:] for row in rows}


def test_the_document_lists_the_cases_there_are():
    for head, rows in tables():
        assert head == ["case", *COLUMNS]
        assert list(rows) == [case.title for case in CASES]


def test_the_document_says_that_tapax_is_right():
    for _, rows in tables():
        marks = {cell for row in rows.values() for cell in row[: len(OURS)]}
        assert marks <= {"works", "none", "–"}


def test_names_and_titles_are_told_apart():
    assert len({case.name for case in CASES}) == len({case.title for case in CASES}) == len(CASES)
