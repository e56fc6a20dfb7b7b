"""The prose of pages and of public docstrings keeps the rules of style that a pattern can check."""

import inspect
import re
from pathlib import Path

import pytest

import tapax
from tests.docs.public_names import list_public

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

START = r"(?:^|(?<=[.!?:] ))"
HABITS = {
    "a sentence with 'What ...' as its subject": START + r"What (?!follows\b)[^.?!]*[.!](?=\s|$)",
    "a sentence with 'Whether ...' as its subject": START + r"Whether [^.?!]*[.!](?=\s|$)",
    "'is no X' for 'is not an X'": (
        r"(?<![Tt]here )\b(?:is|are|was|were) (?:no|none)\b"
        r"(?! (?:longer|more|less|larger|smaller|slower|faster|better|worse|different|other))"
    ),
    "a possessive without its noun": r"\bof [A-Z]\w+'s(?=[.,;:)]|$)",
    "an exclamation": r"(?<=[a-z])!(?=\s|$)",
}
ALLOWED = ()
"""Sentences that keep a habit for a reason."""


def read_paragraphs(text):
    """Split Markdown into paragraphs, without front matter, code, titles and tables."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}|:{3,}).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(#|\||>>>|\.\.\. ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]+`", "`code`", text)
    items = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", items) if part.strip()]


def read_docstring(doc):
    """Split a docstring into paragraphs; those of arguments and results may be clauses."""
    prose = re.split(r"^(?:Args|Attributes|Returns|Raises|Example):$", doc, flags=re.MULTILINE)[0]
    return read_paragraphs(prose)


def find_habits(paragraphs):
    """List the sentences with a habit that the project has dropped."""
    return [
        f"{habit}: {match[0][:80]!r} in {paragraph[:100]!r}"
        for paragraph in paragraphs
        for habit, pattern in HABITS.items()
        for match in re.finditer(pattern, paragraph)
        if not any(allowed in paragraph for allowed in ALLOWED)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_keep_to_the_style(page):
    assert find_habits(read_paragraphs(page.read_text())) == []


@pytest.mark.parametrize("name", sorted(tapax.__all__))
def test_public_docstrings_keep_to_the_style(name):
    faults = []
    for public, thing in list_public(f"tapax.{name}", getattr(tapax, name)):
        members = vars(thing).items() if inspect.isclass(thing) else ()
        documented = [thing, *(member for part, member in members if not part.startswith("_"))]
        for each in documented:
            doc = inspect.getdoc(each) or ""
            if getattr(each, "__module__", public).startswith("tapax"):
                faults += [f"{public}: {fault}" for fault in find_habits(read_docstring(doc))]
    assert faults == []


def test_habits_are_found():
    habits = [
        "What is done once is cached.",
        "It ends. Whether it ran is unknown.",
        "A string is no array.",
        "except numbers of NumPy's.",
        "This is fast!",
    ]
    assert [len(find_habits([habit])) for habit in habits] == [1] * len(habits)


def test_plain_sentences_are_left_alone():
    plain = [
        "What does the output depend on?",
        "There is no kernel.",
        "It is no longer traced.",
        "the shape of NumPy's result",
        "It says whether it ran. Choose what to keep.",
    ]
    assert find_habits(plain) == []
    code = "Text.\n\n```python\nWhat = 1.\n```\n\n| What it is. |\n|---|\n"
    assert find_habits(read_paragraphs(code)) == []
