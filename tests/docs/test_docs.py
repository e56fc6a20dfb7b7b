"""Every example in the documentation runs: docstrings, the README, the demo's parts."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import jax
import matplotlib
import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]


def modules_below(package, folder):
    """Names of a package and every module below it, found without importing any of them."""
    yield package
    for module in pkgutil.iter_modules([str(folder)]):
        name = f"{package}.{module.name}"
        yield from modules_below(name, folder / module.name) if module.ispkg else [name]


MODULES = list(modules_below("tapax", ROOT / "tapax"))
DOCUMENTS = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("semantics", "changing", "memory", "page", "architecture", "format")
    ),
]
NOTEBOOKS = [
    f"docs/{name}.md"
    for name in (
        "gradients", "patching", "watching", "hidden", "online", "ensembles", "datasets",
        "structure_factor",
    )
]  # fmt: skip


def import_or_skip(name):
    """Import a module of tapax, or skip the test where a framework is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "tapax":
            raise
        return pytest.skip(f"{name} needs {error.name}")


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = import_or_skip(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


LONG = pytest.param(NOTEBOOKS[-1], marks=pytest.mark.many)


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTEBOOKS[:-1], LONG])
def test_code_cells_of_documents_run(document, tmp_path, monkeypatch):
    """The cells of a document, run one after the other in one namespace."""
    cell = r"```(?:python|\{code-cell\})\n(.*?)```"
    blocks = re.findall(cell, (ROOT / document).read_text(), re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)  # where pictures are saved
    matplotlib.use("Agg")
    space = {}
    for block in blocks:
        exec(compile(block, document, "exec"), space)
    jax.effects_barrier()
    assert len(list(tmp_path.glob("*.png"))) >= (document in NOTEBOOKS)
