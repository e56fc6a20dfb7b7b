"""Run the code cells of a page as the notebook kernel of the site does.

    python -m tests.docs.pages docs/values.md README.md

prints the value of each cell. Cells of a page share one namespace, and run in a temporary folder.
In README.md the cells are the blocks of Python.
"""

import ast
import contextlib
import linecache
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

FENCE = re.compile(
    r"^(?P<fence>`{3,})\{code-cell\}[^\n]*\n(?P<body>.*?)^(?P=fence)\s*$", re.DOTALL | re.MULTILINE
)
PYTHON = re.compile(r"^```python\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
OPTIONS = re.compile(r"(?:\s*:[\w-]+:[^\n]*\n)*")
SETS_UP_PROCESS = re.compile(r"XLA_FLAGS|os\.environ|jax\.config\.update|jax\.distributed")


class Cell(NamedTuple):
    """A code cell of a page."""

    line: int
    code: str
    raises: bool
    """Whether the cell shows an error."""


def list_pages():
    """List README.md and the pages of docs/ that have code cells, relative to the repository."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found if read_cells(path)]


def read_cells(path):
    """Read the code cells of a page."""
    text = path.read_text()
    pattern = PYTHON if path.name == "README.md" else FENCE
    for match in pattern.finditer(text):
        options = OPTIONS.match(match["body"])[0]
        code = match["body"][len(options) :]
        line = text.count("\n", 0, match.start("body")) + 1 + options.count("\n")
        yield Cell(line, code, "raises-exception" in options)


def run_page(page, show=None):
    """Run the cells of a page, and pass the value of each last expression to `show`."""
    if SETS_UP_PROCESS.search((ROOT / page).read_text()) and "jax" in sys.modules:
        _run_in_process(page)
        return
    space = {"__name__": "__main__"}
    for cell in read_cells(ROOT / page):
        try:
            value = _run_cell(cell, page, space)
        except Exception:
            if not cell.raises:
                raise
        else:
            assert not cell.raises, f"{page}:{cell.line}: the cell did not raise"
            if value is not None:
                (show or _render)(value)


def _run_cell(cell, page, space):
    """Run a cell and return the value of its last expression, or None as in a notebook."""
    name = f"{page}[{cell.line}]"
    lines = cell.code.splitlines(keepends=True)
    linecache.cache[name] = (len(cell.code), None, lines, name)  # what shows sources needs them
    tree = ast.parse(cell.code, name)
    ends_with_value = tree.body and isinstance(tree.body[-1], ast.Expr)
    last = tree.body.pop() if ends_with_value and not cell.code.rstrip().endswith(";") else None
    exec(compile(tree, name, "exec"), space)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), space)


def _render(value):
    """Make the representations that a notebook would show."""
    repr(value)
    for method in ("_repr_html_", "_repr_mimebundle_"):
        if not isinstance(value, type) and hasattr(value, method):
            getattr(value, method)()


def _run_in_process(page):
    """Run a page that sets up JAX before its first use in a process of its own."""
    plain = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    plain.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "tests.docs.pages", str(page)]
    done = subprocess.run(command, env=plain, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def as_notebook():
    """Let `tapax.view` believe that a notebook runs, so that it opens no browser."""
    from tapax.viewer import _browser

    is_notebook = _browser.is_notebook
    _browser.is_notebook = lambda: True
    try:
        yield
    finally:
        _browser.is_notebook = is_notebook


def main(pages):
    os.environ.setdefault("MPLBACKEND", "Agg")
    for page in pages:
        page = Path(page).resolve().relative_to(ROOT)
        if SETS_UP_PROCESS.search((ROOT / page).read_text()) or len(pages) == 1:
            # The first import of JAX must come from the page.
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                run_page(page, show=lambda value: print(repr(value)[:2000], flush=True))
        else:
            _run_in_process(page)


if __name__ == "__main__":
    main(sys.argv[1:])
