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
PACKAGES = (
    "tapax", "tapax.attribute", "tapax.compat", "tapax.hidden", "tapax.hidden.online",
    "tapax.nn", "tapax.plot", "tapax.watching",
)  # fmt: skip
MODULES = [
    name
    for package in PACKAGES
    for path in [importlib.import_module(package).__path__]
    for name in (package, *(f"{package}.{module.name}" for module in pkgutil.iter_modules(path)))
]
DOCUMENTS = ["README.md", *(f"docs/{name}.md" for name in ("semantics", "changing", "frameworks"))]
NOTEBOOKS = [
    f"docs/{name}.md"
    for name in (
        "gradients", "patching", "watching", "hidden", "online", "ensembles", "structure_factor",
    )
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


def test_docstrings_have_examples():
    finder = doctest.DocTestFinder()
    tested = {
        t.name for m in MODULES for t in finder.find(importlib.import_module(m)) if t.examples
    }
    assert {"tapax._mark.sow", "tapax._capture", "tapax._sites", "tapax._mark.scope"} <= tested


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTEBOOKS])
def test_documents(document, tmp_path, monkeypatch):
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
