"""The command line: `tapax COMMAND ...`, or `python -m tapax COMMAND ...`.

A command is a module with `HELP`, `add_arguments(parser)` and `run(parser, options)`, which returns
the exit code. To add a command, add a row to `COMMANDS`.
"""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import tapax.data._command as data
import tapax.data._harvest_command as harvest
import tapax.nonfinite._command as nonfinite
import tapax.viewer._command as view
from tapax import __version__

COMMANDS: Mapping[str, ModuleType] = {
    "data": data,
    "harvest": harvest,
    "nonfinite": nonfinite,
    "view": view,
}

FRAMEWORKS = ("flax", "equinox", "dm-haiku", "brainstate", "keras", "optax")
"""The names on PyPI of packages whose versions `tapax --version` prints if they are installed."""


class PrintVersions(argparse.Action):
    """The option `--version`: prints the versions that a bug report needs, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print("\n".join(list_versions()))
        parser.exit()


def list_versions() -> list[str]:
    """List the versions of tapax, JAX, Python and the installed frameworks, importing none."""
    lines = [f"tapax {__version__}"]
    for name in ("jax", "jaxlib", "numpy", *FRAMEWORKS):
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    lines.append(f"Python {platform.python_version()}")
    lines.append(f"{platform.system()} {platform.machine()}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    parser = argparse.ArgumentParser(prog="tapax")
    parser.add_argument(
        "--version",
        action=PrintVersions,
        nargs=0,
        help="print the versions of tapax, JAX, Python and the frameworks, and exit",
    )
    added = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(added.add_parser(name, help=command.HELP))
    options = parser.parse_args(argv)
    return COMMANDS[options.command].run(added.choices[options.command], options)


if __name__ == "__main__":
    sys.exit(main())
