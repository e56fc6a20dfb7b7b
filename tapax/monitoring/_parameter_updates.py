"""Updates of parameters inside a watched step: which results of its program are the new values.

A monitor with `exact=False` has no arrays from before the step to compare with those after it,
because the step may donate them. So the program computes the updates itself. `with_updates` adds
the arrays that the step replaces in its objects to the results of the step. `ParameterUpdates`
finds the new value of each parameter among them, or in the result of the step, by the structure of
the argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tapax import _jax
from tapax._calling.program import Program
from tapax._frameworks.patches import current
from tapax._jax import Value
from tapax.monitoring._named_arrays import Argument, find_replaced, find_updated, list_arguments


class UpdatedResult(NamedTuple):
    """The result of a step, and the arrays that the step replaced in its objects, by name."""

    out: Any
    replaced: dict[str, Any]


def with_updates(step: Callable[..., Any]) -> Callable[..., UpdatedResult]:
    """Make a function that runs a step and returns an `UpdatedResult`."""

    # An adapter makes this function from the objects of a trace, so it must close over nothing
    # except the step.
    @functools.wraps(step, updated=())
    def updated(*args: Any, **kwargs: Any) -> UpdatedResult:
        arguments = list_arguments(step, args, kwargs)
        before = {name: x for argument in arguments for name, x in argument.arrays().items()}
        # If the step is a method, an adapter may have replaced it for the trace.
        out = current(step)(*args, **kwargs)
        return UpdatedResult(out, find_replaced(arguments, before))

    return updated


class ParameterUpdates(NamedTuple):
    """The results of a program that are the new values of parameters.

    `places` maps a parameter to the number of a result, or to None if the program leaves the
    parameter as it is. `added` has the numbers of the results that `with_updates` added. `unknown`
    names the arguments whose new values are not among the results.
    """

    places: Mapping[str, int | None]
    added: frozenset[int]
    unknown: tuple[str, ...]

    @classmethod
    def of(
        cls, program: Program, arguments: Sequence[Argument], parameters: Sequence[str]
    ) -> ParameterUpdates:
        """Find the new values of parameters of some arguments in a program of `with_updates`."""
        types = [_type_of(v) for v in _jax.open_jaxpr(program.jaxpr).outvars]
        numbers = {id(t): i for i, t in enumerate(types)}
        parts = jax.tree.leaves(program.join(types), is_leaf=_is_updated)
        (found,) = filter(_is_updated, parts)
        unchanged = dict.fromkeys(parameters)
        after, unknown = find_updated(arguments, found.replaced, found.out, unchanged)
        places = {name: x and numbers[id(x)] for name, x in after.items()}
        added = frozenset(numbers[id(x)] for x in found.replaced.values())
        return cls(places, added, tuple(unknown))

    def take(
        self, outs: Sequence[Value], before: Mapping[str, Value]
    ) -> tuple[list[Any], dict[str, Value]]:
        """Return the results, with None for those that were added, and the new parameters."""
        after = {name: before[name] if i is None else outs[i] for name, i in self.places.items()}
        return [None if i in self.added else x for i, x in enumerate(outs)], after


def _is_updated(part: Any) -> bool:
    return isinstance(part, UpdatedResult)


def _type_of(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
