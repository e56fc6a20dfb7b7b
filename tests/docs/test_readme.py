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


@pytest.mark.parametrize("address", sorted(set(re.findall(r"\]\((.*?)\)", TEXT))))
def test_links_lead_to_files_of_the_repository(address):
    """PyPI shows the README without these files; the build makes the addresses absolute there."""
    assert (ROOT / address).exists()
