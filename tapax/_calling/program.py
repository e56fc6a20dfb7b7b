"""A program, which is a function traced with its marks, and the walk that evaluates it.

This module depends neither on the origin of the arguments nor on whether the function is compiled:
see `_calling.transform` for both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tapax import _jax
from tapax._calling.collect import collect
from tapax._calling.free_variables import FreeVariables
from tapax._calling.garbage import full_collections_paused
from tapax._calling.signature import Signature
from tapax._frameworks import registry
from tapax._frameworks.anchors import argument_paths, is_anchored, resolve
from tapax._frameworks.attention import observe_attention
from tapax._frameworks.interface import FunctionCall
from tapax._frameworks.module_paths import new_call_stack
from tapax._jax import Function, Jaxpr, PyTree, Static, Value, pytrees, typed
from tapax._jax.pytrees import ValueStructure, split_arrays
from tapax._marks.context import Structure
from tapax._marks.fingerprints import fingerprint
from tapax._marks.operations import internal_operations, with_marks
from tapax._marks.parameters import mark_parameters
from tapax._results import Taps
from tapax._sites import name_of
from tapax._walk import mapped_predicates
from tapax._walk.changes import Changes
from tapax._walk.plan import Plan
from tapax._walk.walk import Walk

mapped_predicates.register()


@dataclasses.dataclass(frozen=True)
class ResultNumber:
    """A placeholder for a result of a program, by its number."""

    number: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function: its jaxpr, and the structure that joins its results.

    `keys` are the paths of the arrays among the arguments.
    """

    jaxpr: Jaxpr
    structure: ValueStructure
    keys: tuple[Any, ...]

    def join(self, arrays: Sequence[Any]) -> Any:
        return self.structure.join(arrays)

    def only(self, pick: Callable[[Any], Any]) -> Program:
        """Return the program with only the results that `pick` selects."""
        kept, structure = split_arrays(self.numbered(pick), lambda x: isinstance(x, ResultNumber))
        return Program(_jax.dce(self.jaxpr, [x.number for x in kept]), structure, self.keys)

    def numbered(self, pick: Callable[[Any], Any]) -> Any:
        """Apply `pick` to the result of the function, with `ResultNumber`s in place of arrays."""
        count = len(_jax.open_jaxpr(self.jaxpr).outvars)
        return pick(self.join([ResultNumber(i) for i in range(count)]))

    def walk(
        self,
        plan: Plan,
        arrays: Sequence[Any],
        changes: Changes | None = None,
        *,
        warn: bool = False,
    ) -> tuple[list[Any], Taps]:
        """Evaluate the program; return its results as arrays, and the sites that the plan selects.

        With `warn`, warn if the program has no sites.
        """
        walk = Walk(plan, changes)
        outs = self.run(walk, arrays)
        with internal_operations():
            return outs, collect(walk, warn=warn)

    def run(self, walk: Walk, arrays: Sequence[Any]) -> list[Any]:
        """Evaluate the program; return its results as arrays."""
        with internal_operations(), full_collections_paused:
            outs = walk.run(self.jaxpr, arrays)
            return walk.materialize(_jax.open_jaxpr(self.jaxpr).outvars, outs)


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A program, and the arrays of one call.

    `operands`, a pytree of arrays, are inputs of a transform that the program does not have. They
    are `checked` if their values were known and `Transform.check` has accepted them. `returned` is
    the result of the function itself, without the state of objects, with `ResultNumber`s in place
    of arrays.
    """

    program: Program
    arrays: Sequence[Any]
    operands: Any = ()
    checked: bool = True
    returned: PyTree = None

    def run_changed(self, changes: Changes) -> list[Any]:
        """Evaluate the program with `changes` of some values; return its results as arrays."""
        return self.program.run(Walk(Plan(None, None), changes), self.arrays)


def trace(fn: Function, call: FunctionCall, plan: Plan, signature: Signature) -> Program:
    """Trace a call of `fn`; arguments that are not static in `signature` are traced."""
    arguments = call.arguments
    keyed = pytrees.leaves_with_path(arguments)
    arrays = signature.traced([leaf for _, leaf in keyed])

    def flat(*arrays: Value) -> Any:
        arguments = signature.join(arrays)
        given = {id(leaf) for leaf in jax.tree.leaves(arguments)}
        out = call.run(arguments)
        results, structure = split_arrays(out, lambda x: isinstance(x, jax.Array))
        for _, x in structure.fixed:
            # A function that the model contains and returns unchanged hides no traced values.
            if not (callable(x) and id(x) in given):
                _check_result(fn, x)
        return results, Static(structure)

    policy = plan.marking_policy(Structure.of(arguments, fn))
    if callable(plan.policy):
        # JAX must not reuse the trace of a jitted function with marks that the filter chose before.
        read = [reading.value for reading in FreeVariables.of(plan.policy).readings]
        policy = dataclasses.replace(policy, read=frozenset({fingerprint((plan.policy, read))}))
    weights = observe_attention() if "weights" in policy.asked else contextlib.nullcontext()
    with (
        full_collections_paused,
        registry.observe_calls(),
        weights,
        _jax.intercept_vjp(mark_parameters) if policy.parameters else contextlib.nullcontext(),
        with_marks(policy),
        new_call_stack(),
        jax.disable_jit(False),
        _jax.no_names(),
    ):
        trace_flat = typed.make_jaxpr(flat, return_shape=True)
        jaxpr, (_, structure) = registry.trace_program(lambda: trace_flat(*arrays))
    if is_anchored(jaxpr):
        paths = argument_paths(fn, arguments, registry.is_module, call.user_keys)
        jaxpr = resolve(jaxpr, signature.traced(paths))
    keys = signature.traced([path for path, _ in keyed])
    return Program(jaxpr, structure.value, tuple(keys))


def _check_result(fn: Function, x: Value) -> None:
    """Refuse a result that may hide traced values from JAX."""
    if not isinstance(x, (str, bytes, bool, int, float, complex, np.generic, np.ndarray, *_FIXED)):
        raise TypeError(
            f"{name_of(fn)} returns {type(x).__name__}, which is neither an array nor a container "
            "that JAX knows, so a traced program cannot return its contents. Return a pytree: "
            "register the class with jax.tree_util.register_dataclass."
        )


_FIXED = (type(None), enum.Enum, type, np.dtype)
