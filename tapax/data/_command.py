"""The command `tapax data`, which describes or checks a dataset of activations.

    tapax data acts           prints the dataset as a table
    tapax data verify acts    reads every byte and lists the damaged shards

The exit code is 0, 1 if the dataset is damaged, or 2 if the folder does not contain a dataset.
"""

import argparse
import sys

from tapax.data._activations import Activations
from tapax.data._folder import is_dataset
from tapax.data._verify import verify_dataset

HELP = "describe or check a dataset of activations"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.usage = "tapax data [verify] PATH"
    parser.add_argument("words", nargs="+", metavar="PATH", help="the folder of the dataset")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    *before, path = options.words
    if before not in ([], ["verify"]):
        parser.error(f"The command takes a folder, or `verify` and a folder, not {options.words}.")
    if not is_dataset(path):
        parser.error(f"There is no dataset of activations in {path!r}.")
    try:
        return _verify(path) if before else _describe(path)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1


def _describe(path: str) -> int:
    acts = Activations(path)
    print(acts)
    if not acts.is_complete:
        print(f"The harvest is not finished. {acts.manifest.continuation}")
    return 0


def _verify(path: str) -> int:
    found = verify_dataset(path)
    print(found)
    return 0 if found.is_whole else 1
