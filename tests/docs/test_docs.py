"""Every example in the documentation runs: in docstrings, in README.md and on every page."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import jax
import matplotlib
import matplotlib.pyplot as plt
import pytest

from tests.docs.pages import as_notebook, list_pages, read_cells, run_page

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
SHORT = ("README.md", "docs/start/quickstart.md", "docs/reference/", "docs/format.md")
"""Pages that `make test` runs. `make docs` and `make test-matrix` run all."""


def modules_below(package, folder):
    """Names of a package and every module below it, found without importing any of them."""
    yield package
    for module in pkgutil.iter_modules([str(folder)]):
        name = f"{package}.{module.name}"
        yield from modules_below(name, folder / module.name) if module.ispkg else [name]


MODULES = list(modules_below("tapax", ROOT / "tapax"))


def import_or_skip(name):
    """Import a module of tapax, or skip the test where a framework is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return skip_without_package(name, error)


def skip_without_package(what, error):
    """Skip a test that needs a package which is not installed."""
    if error.name is None or error.name.partition(".")[0] in ("tapax", "tests", "examples"):
        raise error
    return pytest.skip(f"{what} needs {error.name}")


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = import_or_skip(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.startswith(SHORT) else pytest.mark.many)
        for page in list_pages()
    ],
)
@pytest.mark.filterwarnings("default")  # a page may show a warning
def test_code_cells_of_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where pages write their files
    matplotlib.use("Agg")
    try:
        with as_notebook():
            run_page(page)
    except ModuleNotFoundError as error:
        skip_without_package(page, error)
    finally:
        plt.close("all")
    jax.effects_barrier()


def test_cells_of_a_page_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n```{code-cell}\nx = 1\n```\n\n```python\nnot run\n```\n\n"
        "```{code-cell} python\n:tags: [raises-exception]\n\n1 / 0\n```\n"
    )
    first, second = read_cells(page)
    assert (first.line, first.code, first.raises) == (4, "x = 1\n", False)
    assert (second.line, second.code.strip(), second.raises) == (13, "1 / 0", True)
