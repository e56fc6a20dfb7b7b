"""Pages, docstrings, comments, errors and test names keep the rules that a pattern can check."""

import ast
import inspect
import io
import re
import tokenize
from pathlib import Path

import pytest

import tapax
from tests.docs.public_names import list_public

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("tapax", "tests", "conformance", "benchmarks", "examples", "scripts", "docs")

START = r"(?:^|(?<=[.!?:] ))"
HABITS = {
    "a sentence with 'What ...' as its subject": START + r"What (?!follows\b)[^.?!]*[.!](?=\s|$)",
    "a sentence with 'Whether ...' as its subject": START + r"Whether [^.?!]*[.!](?=\s|$)",
    "'is no X' for 'is not an X'": (
        r"(?<![Tt]here )\b(?:is|are|was|were) (?:no|none)\b"
        r"(?! (?:longer|more|less|larger|smaller|slower|faster|better|worse|different|other))"
    ),
    "a possessive without its noun": r"\bof [A-Z]\w+'s(?=[.,;:)]|$)",
    "a preposition at the end of a sentence": r"(?<!\.)\b(?:of|for|with|to|from|by|at)[.;](?=\s|$)",
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


def read_comments(source):
    """Join the comments on successive lines of a program to paragraphs."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    lines = (
        ("" if line - 1 in comments else "\n") + comment.lstrip("# ")
        for line, comment in comments.items()
    )
    return read_paragraphs("\n".join(lines))


def read_program(source):
    """List the paragraphs of all docstrings and comments of a program, and the names of tests."""
    found = read_comments(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found += read_docstring(ast.get_docstring(node) or "")
            name = getattr(node, "name", "")
            found += [name.replace("_", " ")] if name.startswith("test_") else []
    return found


def read_messages(source):
    """List the paragraphs of all sentences in the strings of a program, apart from docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    pieces = {id(x) for node in nodes if isinstance(node, ast.JoinedStr) for x in node.values}
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = []
    for node in nodes:
        if id(node) not in pieces | docstrings:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(getattr(part, "value", "")) for part in parts if is_text(part))
            found += read_paragraphs(text) if text.count(" ") > 3 else []
    return found


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_comments_and_test_names_keep_to_the_style(folder):
    assert [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for fault in find_habits(read_program(path.read_text()))
    ] == []


def test_errors_and_warnings_keep_to_the_style():
    assert [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in sorted((ROOT / "tapax").rglob("*.py"))
        for fault in find_habits(read_messages(path.read_text()))
    ] == []


def test_errors_and_warnings_are_read():
    source = '''
def f(x):
    """The string is no array."""
    if x:
        raise ValueError(f"The argument {x!r} " "is no array.")
    raise TypeError("There is no run. Call init() first.")
'''
    assert len(find_habits(read_messages(source))) == 1


def test_docstrings_comments_and_test_names_are_read():
    source = '''
def test_a_string_is_no_array():
    """Test it. What is tested is a string."""
    # What follows is code. A string
    # is no array.
    return 1
'''
    assert len(find_habits(read_program(source))) == 3


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
