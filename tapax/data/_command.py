"""The command `tapax data`, which describes or checks a dataset of activations.

    tapax data acts           prints the dataset as a table
    tapax data verify acts    reads every byte and lists the damaged shards

The exit code is 0, 1 if a shard is damaged, or 2 if the folder does not contain a dataset.
"""

import argparse

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
    if not before:
        acts = Activations(path)
        print(acts)
        if not acts.is_complete:
            print(
                "The harvest is not finished. Call `harvest` again with the same arguments to "
                "continue it."
            )
        return 0
    found = verify_dataset(path)
    print(found)
    return 0 if found.is_whole else 1
