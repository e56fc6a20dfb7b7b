"""The command line: `tapax COMMAND ...`, or `python -m tapax COMMAND ...`.

A command is a module with `HELP`, `add_arguments(parser)` and `run(parser, options)`, which returns
the exit code. Adding one is adding a row to `COMMANDS`.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    parser = argparse.ArgumentParser(prog="tapax")
    parser.add_argument("--version", action="version", version=f"tapax {__version__}")
    added = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(added.add_parser(name, help=command.HELP))
    options = parser.parse_args(argv)
    return COMMANDS[options.command].run(added.choices[options.command], options)


if __name__ == "__main__":
    sys.exit(main())
