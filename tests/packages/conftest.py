"""Tests of other packages take long to import and compile, and run in only one environment.

It is the newest. gpjax, which requires an old jax, runs wherever it is installed. `make test` runs
the first test of each package, and `make fuzz` runs the others.
"""

import importlib.util
from pathlib import Path

import pytest

OLD = "test_gpjax.py"


def pytest_ignore_collect(collection_path, config):
    if collection_path.name == OLD:
        return True if importlib.util.find_spec("gpjax") is None else None
    is_file = collection_path.suffix == ".py"
    return True if is_file and "not once" in config.option.markexpr else None


def pytest_collection_modifyitems(items):
    seen = set()
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            if item.path in seen:
                item.add_marker(pytest.mark.many)
            elif item.path.name != OLD:
                item.add_marker(pytest.mark.once)
            seen.add(item.path)
