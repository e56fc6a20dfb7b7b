"""A page whose bundle is a stub, for tests that run no browser."""

import pytest

STUB = "var tapaxPage = { render() {} };"


@pytest.fixture
def stub_bundle(monkeypatch):
    """The bundle is built by Node, which these tests do not need."""
    for module in ("_html", "_server", "_notebook"):
        monkeypatch.setattr(f"tapax.viewer.{module}.read_bundle", lambda: STUB)
    return STUB
