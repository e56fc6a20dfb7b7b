"""The command `tapax harvest script.py:make`: one worker of a harvest, for any scheduler.

    tapax harvest script.py:make                  harvests alone
    tapax harvest script.py:make --worker 3/16    harvests as worker 3 of 16, counted from 0

`make` is a function of the script that returns the arguments of `tapax.harvest` as a dict:

    def make():
        return {"fn": load_model(), "batches": load_batches(), "to": "acts", "values": "**/mlp"}

An array job runs this command in each task, with the number of the task as the number of the
worker. A task that was killed may be restarted, but need not be: the others do its units. The exit
code is 0, 1 if the dataset is not complete or cannot be written, or 2 if an argument is wrong.
"""

import argparse
import inspect
import os
import re
import runpy
import sys
from collections.abc import Mapping
from typing import Any

from tapax._sites import SiteError
from tapax.data._folder import UnwritableError, WorkerTakenError
from tapax.data._harvest import harvest
from tapax.data._manifest import OtherDatasetError

HELP = "harvest activations as one of several workers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "make", metavar="SCRIPT:FUNCTION", help="returns the arguments of tapax.harvest as a dict"
    )
    parser.add_argument("--worker", metavar="I/N", help="be worker I of N; the first is 0")
    parser.add_argument("--to", metavar="DIR", help="the folder, instead of that in the dict")
    parser.add_argument(
        "--no-take-over",
        action="store_true",
        help="do only the units of this worker, for workers with separate folders",
    )


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    script, _, name = options.make.rpartition(":")
    if not script or not name:
        parser.error(
            f"The command takes SCRIPT:FUNCTION, such as script.py:make, not {options.make!r}."
        )
    if not os.path.isfile(script):
        parser.error(f"There is no script {script!r}.")
    given: dict[str, Any] = {"take_over": False} if options.no_take_over else {}
    if options.worker is not None:
        found = re.fullmatch(r"(\d+)/(\d+)", options.worker)
        if found is None or not int(found[1]) < int(found[2]):
            parser.error(
                f"--worker takes I/N for worker I of N, counted from 0, not {options.worker!r}."
            )
        given["worker"] = int(found[1]), int(found[2])
    if options.to is not None:
        given["to"] = options.to
    arguments = {**_call(parser, script, name), **given}
    try:
        inspect.signature(harvest).bind(**arguments)
    except TypeError as error:
        parser.error(f"{name!r} should return the arguments of tapax.harvest: {error}.")
    try:
        acts = harvest(**arguments)
    except (SiteError, OtherDatasetError, WorkerTakenError) as error:
        parser.error(str(error))
    except UnwritableError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{acts.path}: {len(acts):,} rows, {acts.progress}")
    return 0 if acts.is_complete or not arguments.get("take_over", True) else 1


def _call(parser: argparse.ArgumentParser, script: str, name: str) -> Mapping[str, Any]:
    """Run a script, under a name other than `__main__`, and call one of its functions."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    space = runpy.run_path(script, run_name=os.path.splitext(os.path.basename(script))[0])
    if not callable(space.get(name)):
        parser.error(f"The script {script!r} has no function {name!r}.")
    arguments = space[name]()
    if not isinstance(arguments, Mapping):
        parser.error(
            f"{name!r} should return a dict with the arguments of tapax.harvest, but returned a "
            f"{type(arguments).__name__}."
        )
    return arguments
