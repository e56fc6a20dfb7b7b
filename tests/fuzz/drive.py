"""`sweep` runs a check over many programs, for the tests and for the command line."""

from __future__ import annotations

import pprint
import time
import traceback
from collections.abc import Callable, Collection
from typing import cast

import jax
from hypothesis import HealthCheck, Phase, Verbosity, given, reject, settings
from hypothesis import seed as with_seed
from hypothesis.strategies import SearchStrategy

from .build import build, mesh_of
from .compare import arguments, compare_result
from .program import Program
from .reference import Undecided, run
from .shrink import shrink


class Failure(Exception):
    """A failed check; `program` is the smallest failing program found."""

    def __init__(
        self, check: Callable[[Program], None], program: Program, cause: Exception
    ) -> None:
        super().__init__(program, cause)
        self.check, self.program, self.cause = check, program, cause

    def report(self) -> str:
        """Return the program as runnable Python, and the error."""
        name = self.check.__name__
        text = pprint.pformat(self.program, width=100)
        trace = "".join(traceback.format_exception(self.cause))
        module = self.check.__module__
        imports = "from tests.fuzz.program import *\nfrom tests.fuzz.drive import checked\n"
        imports += f"from {module} import {name}\n"
        return f"{trace}\n{imports}\nprogram = {text}\nchecked({name}, program)\n"

    def __str__(self) -> str:
        return f"{self.cause}\n{pprint.pformat(self.program, width=100)}"


def checked(check: Callable[[Program], None], program: Program) -> None:
    """Check a program on its mesh.

    Raises `Undecided` if JAX itself rejects the program, or disagrees with the
    reference: JAX 0.10 computes another second derivative of a custom_jvp in a loop.
    """
    with mesh_of(program):
        try:
            check(program)
        except Exception as error:
            if isinstance(error, Undecided) or _is_right_in_jax(program):
                raise
            raise Undecided("JAX refuses this program, or differs from the reference") from error


def _is_right_in_jax(program: Program) -> bool:
    try:
        out = jax.jit(build(program))(*arguments(program))
        compare_result(run(program), out)
    except Exception:
        return False
    return True


def sweep(
    check: Callable[[Program], None],
    strategy: SearchStrategy[Program],
    *,
    examples: int,
    seed: int,
    tick: Callable[[], None] = lambda: None,
    end: float | None = None,
) -> None:
    """Check `examples` programs drawn from the strategy, which a seed determines.

    Programs that the reference cannot decide do not count. Raises `Failure` for the smallest
    failing program found. After the time `end` the remaining programs pass unchecked.
    """
    failed: Program | None = None

    @with_seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate,),
        suppress_health_check=cast(Collection[HealthCheck], list(HealthCheck)),
        report_multiple_bugs=False,
    )
    @given(strategy)
    def each(program: Program) -> None:
        nonlocal failed
        if failed is not None or (end is not None and time.monotonic() > end):
            return
        try:
            checked(check, program)
        except Undecided:
            reject()
        except Exception:
            failed = program
            return
        tick()

    each()
    # Thousands of live executables exhaust the memory maps that Linux allows a process.
    jax.clear_caches()
    if failed is not None:
        error = _failure(check, failed)
        assert error is not None, f"This fails at times: {failed}"
        # Another kind of error is another fault, or an invalid program left by a cut.
        small = shrink(failed, lambda p: type(_failure(check, p)) is type(error))
        raise Failure(check, small, _failure(check, small) or error)


def _failure(check: Callable[[Program], None], program: Program) -> Exception | None:
    try:
        checked(check, program)
    except Undecided:
        return None
    except Exception as error:
        return error
    return None
