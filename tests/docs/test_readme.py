"""The README is short, its example prints the table that it shows, and its links lead somewhere."""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SITE = "https://tapax.readthedocs.io/en/latest/"
FILES = ("https://raw.githubusercontent.com/tapax/tapax/main/",)
FILES += ("https://github.com/tapax/tapax/blob/main/",)


def read_block(language, number=0):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)[number]


def read_rows(table):
    """Split the rows of a table that rich printed into their cells."""
    lines = (line for line in table.splitlines() if line[:1] in ("┃", "│"))
    return [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines]


def test_the_readme_is_short():
    assert len(TEXT.splitlines()) <= 150
    assert len([line for line in read_block("python").splitlines() if line.strip()]) <= 15


def test_the_quickstart_prints_the_table_that_the_readme_shows():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(read_block("python"), "quickstart.py", "exec"), {})
    jax.effects_barrier()
    printed, shown = read_rows(out.getvalue()), read_rows(read_block("text"))
    assert printed[0] == shown[0] == ["site", "type", "value rms", "grad rms", "source"]
    for row, expected in zip(printed[1:], shown[1:], strict=True):
        assert [row[0], row[1], row[4]] == [expected[0], expected[1], expected[4]]
        for number, other in zip(row[2:4], expected[2:4], strict=True):
            assert float(number) == pytest.approx(float(other), rel=0.1)


def find_targets():
    """List the addresses of links and images, each with the file that it must lead to."""
    for address in re.findall(r"\]\((.*?)\)", TEXT):
        page, name = address.removeprefix(SITE), address
        for prefix in FILES:
            name = name.removeprefix(prefix)
        yield address, f"docs/{page.removesuffix('.html')}.md" if page != address else name


@pytest.mark.parametrize(("address", "path"), sorted(set(find_targets())))
def test_links_are_absolute_and_lead_to_a_file(address, path):
    """PyPI shows the README without the files around it, so no address may be relative."""
    assert address.startswith((SITE, *FILES)) and (ROOT / path).exists()
