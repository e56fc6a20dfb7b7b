"""The command `tapax nonfinite script.py`, which finds the first bad step of a script.

The command runs the script unchanged, with the arguments of the script. It checks the results of
the jitted functions that the script calls, and the objects that they update. A jitted function
comes from `jax.jit`, or from the `jit` of Flax NNX, Equinox or brainstate. At the first result with
a NaN or an infinity the command runs `tapax.find_nonfinite` on the inputs of that call, prints the
report, and saves the inputs: `inputs.safetensors` has the arrays, `inputs.json` describes them.

    tapax nonfinite --save bad train.py --lr 0.1
    tapax nonfinite --replay bad train.py --lr 0.1

The second command runs the script up to the first call of that function, and searches the call on
the saved inputs instead of its arguments.

The exit code is 1 if the command found a bad value, 2 if there is no script, and otherwise the exit
code of the script: 0 if it ended normally. Infinities in constants and arguments are intended, and
do not stop the script.
"""

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from tapax.nonfinite._saved_inputs import load_inputs
from tapax.nonfinite._script_watch import ScriptStop, ScriptWatch, say

HELP = "run a script, and stop where the first NaN or infinity is made"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "--save", metavar="DIR", default="nonfinite", help="the folder for the inputs of that call"
    )
    parser.add_argument(
        "--every", metavar="N", type=int, default=1, help="check every N-th call of a function"
    )
    parser.add_argument("--replay", metavar="DIR", help="search on the inputs saved in DIR")
    parser.add_argument("script", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if options.every < 1:
        parser.error(f"--every must be at least 1, but is {options.every}.")
    if not os.path.isfile(options.script):
        parser.error(f"There is no script {options.script!r}.")
    saved = None
    if options.replay is not None:
        try:
            saved = load_inputs(options.replay)
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"{options.replay!r} has no saved inputs that can be read: {error}")
    watch = ScriptWatch(options.every, options.save, saved)
    return _run_script(options.script, options.arguments, watch)


def _run_script(script: str, arguments: Sequence[str], watch: ScriptWatch) -> int:
    """Run a script under a watch; return the exit code."""
    script = os.path.abspath(script)
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
    code: Any = 0
    try:
        with watch.active():
            runpy.run_path(script, run_name="__main__")
    except ScriptStop as stop:
        say(str(stop.finding))
        for line in stop.notes:
            say(line)
        return 1
    except SystemExit as exit:
        code = exit.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        code = 0 if code is None else code if isinstance(code, int) else 1
    except BaseException as error:
        _print_traceback(error)
        say(f"The script failed. {watch.summary()}")
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.argv, sys.path[0] = before
    say(watch.summary())
    return code


def _print_traceback(error: BaseException) -> None:
    """Print the traceback from the script on, as Python would without the command."""
    frames = error.__traceback__
    while frames is not None and not _is_of_script(frames.tb_frame):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames or error.__traceback__)


def _is_of_script(frame: Any) -> bool:
    return frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename == sys.argv[0]
