"""Every example in the documentation runs: docstrings, the README, the demo's parts."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import jax
import pytest

import jaxtap

ROOT = Path(__file__).parent.parent
MODULES = ["jaxtap", *(f"jaxtap.{m.name}" for m in pkgutil.iter_modules(jaxtap.__path__))]


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
    assert {"jaxtap._mark.sow", "jaxtap._capture", "jaxtap._sites", "jaxtap._mark.scope"} <= tested


@pytest.mark.parametrize("document", ["README.md", "docs/semantics.md", "docs/frameworks.md"])
def test_documents(document):
    """The Python blocks of a document, run one after the other in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert blocks
    space = {}
    for block in blocks:
        exec(compile(block, document, "exec"), space)
    jax.effects_barrier()
