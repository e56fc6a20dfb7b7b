"""Other people's packages take long to import and to compile, and run in one environment alone."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path, config):
    return True if "not once" in config.option.markexpr else None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.once)
