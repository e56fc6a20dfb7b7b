"""The command line: `tapax COMMAND ...`, or `python -m tapax COMMAND ...`.

A command is a module with `HELP`, `add_arguments(parser)` and `run(parser, options)`, which returns
the exit code. To add a command, add a row to `COMMANDS`. Only the module of the chosen command is
imported, because these imports take longer than some commands.
"""

import argparse
import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tapax import __version__

COMMANDS: Mapping[str, str] = {
    "data": "tapax.data._command",
    "harvest": "tapax.data._harvest_command",
    "nonfinite": "tapax.nonfinite._command",
    "view": "tapax.viewer._command",
}
"""The module of each command."""

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
    first = next(iter(sys.argv[1:] if argv is None else argv), "")
    chosen = {first: COMMANDS[first]} if first in COMMANDS else COMMANDS
    modules = {name: importlib.import_module(module) for name, module in chosen.items()}
    for name, command in modules.items():
        command.add_arguments(added.add_parser(name, help=command.HELP))
    options = parser.parse_args(argv)
    return modules[options.command].run(added.choices[options.command], options)


if __name__ == "__main__":
    sys.exit(main())
