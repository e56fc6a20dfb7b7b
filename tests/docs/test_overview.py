"""The page "All of tapax on one page" mentions every public name of tapax."""

import re
from pathlib import Path

import pytest

import tapax

pytestmark = pytest.mark.once

PAGE = Path(__file__).parents[2] / "docs" / "start" / "overview.md"
NAMESPACES = ["reduce", "alert", "sink", "plot", "attribute", "hidden", "hidden.online", "nn"]
NAMESPACES += ["data", "viewer", "compat", "compat.oryx", "compat.braintrace"]


def list_names(namespace):
    if namespace in ("alert", "sink"):
        return getattr(tapax, namespace).__all__
    return pytest.importorskip(f"tapax.{namespace}").__all__


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_name_of_a_namespace_is_on_the_page(namespace):
    words = set(re.findall(r"\w+", PAGE.read_text()))
    assert not set(list_names(namespace)) - words


def test_every_name_of_the_package_is_on_the_page():
    assert not set(tapax.__all__) - set(re.findall(r"tapax\.(\w+)", PAGE.read_text()))
