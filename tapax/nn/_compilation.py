"""Compilation of functions that run other transforms, as one program, for any framework."""

import dataclasses
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from tapax import _jax
from tapax._api.change_builder import ChangeBuilder
from tapax._calling.program import TracedCall
from tapax._calling.transform import Transform, transformed
from tapax._jax import PyTree, Value
from tapax._marks.operations import internal_operations
from tapax._walk.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class _RunNeeded(Transform):
    """The transform that runs a program without the operations that its results do not need.

    A cut leaves the marks after it in the program, and these keep the values that they mark.
    """

    plan: Plan
    stateless = True

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        def plain(*arrays: Value) -> Any:
            changes = ChangeBuilder().changes()
            return dataclasses.replace(call, arrays=arrays).run_changed(changes)

        made = jax.make_jaxpr(plain)(*call.arrays)
        with internal_operations():
            return _jax.as_function(_jax.dce(made))(*call.arrays), ()


def compiled(fn: Callable[P, R]) -> Callable[P, R]:
    """Make a function like `fn` that is compiled once for each kind of arguments.

    Modules among the arguments, and modules that `fn` closes over, pass their arrays to the
    program, and do not change.
    """
    return transformed(fn, _RunNeeded(Plan.make((), None)))
