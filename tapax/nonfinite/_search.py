"""`find_nonfinite`: where the first NaN or infinity comes from that reaches a result.

>>> import jax, jax.numpy as jnp, tapax
>>> @jax.jit
... def f(x):
...     return jax.lax.scan(lambda c, x: (c + jnp.log(x), None), 0.0, x)[0]
>>> found = tapax.find_nonfinite(f)(jnp.array([1.0, 2.0, -1.0, 3.0]))
>>> found.operation, found.iterations, found.kind
('log', (2,), 'nan')
>>> tapax.find_nonfinite(f)(jnp.array([1.0, 2.0, 3.0])) is None
True

Three compiled passes. The first is the function as it is, and one flag: whether a result is bad.
That is all that is paid if none is. The second carries an origin with every value (`_origins`), and
gives one place: an equation, and the iterations around it. The third measures that equation there
(`_measurement`).

A program that raises at a bad value, as `equinox.error_if` and `jax_debug_nans` make it, has the
finding instead of the error; one that raises for another reason raises.

A value that is masked, as by `where`, or swallowed, as by `1 / inf`, is no finding, nor is a
constant such as the `-inf` of a mask. The NaN of `inf - inf` is one. An argument that is not finite
and reaches a result is found as the operation `"argument"`, if nothing else was made that is not
finite; a constant as `"constant"`.

Sharp edges: origins are those of whole arrays, so where two faults meet in one array, the earlier
is taken to be the one that went on. Iterations count from 0 in the order of the indices: a backward
pass that goes from the last layer to the first has those of the forward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax

from tapax._calling.program import TracedCall
from tapax._calling.source_lines import ArgumentNames
from tapax._calling.transform import Transform, TransformedFunction, check_function
from tapax._jax import PyTree
from tapax._walk.plan import Plan
from tapax.nonfinite import _source_location
from tapax.nonfinite._finding import Finding
from tapax.nonfinite._passes import SearchPasses, describe_value

P = ParamSpec("P")


def find_nonfinite(fn: Callable[P, Any], *, masked: bool = False) -> Callable[P, Finding | None]:
    """A function that tells where the first NaN or infinity comes from that `fn` returns.

    It is None if all results are finite, the state that `fn` updates included. Nothing is updated,
    and no argument donated. With `masked`, values that reach no result count as well.
    """
    check_function(fn, "find_nonfinite")
    if not isinstance(masked, bool):
        raise TypeError(f"`masked` must be True or False, but is {masked!r}.")
    search = NonfiniteSearch(fn, masked)

    @functools.wraps(fn, updated=())
    def find(*args: P.args, **kwargs: P.kwargs) -> Finding | None:
        return search.find(args, kwargs)

    return find


@dataclasses.dataclass(frozen=True)
class _NonfiniteTransform(Transform):
    """Finds the first bad value of the results; updates no object.

    The operands, if there are any, are the arrays to search on instead of those of the call.
    """

    plan: Plan
    masked: bool
    is_traceable = False
    no_values = (
        "find_nonfinite({}) was called inside of a transformation, such as jax.jit or jax.vmap, "
        "where no value is known. Call it on the function that is transformed: "
        "find_nonfinite(jax.jit(fn))(...)."
    )

    def prepare(self, call: TracedCall) -> SearchPasses:
        return SearchPasses(call.program.jaxpr, self.masked)

    def run(self, call: TracedCall, prepared: SearchPasses) -> Any:
        searched = call.operands or call.arrays
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            found = prepared(*searched)
        if isinstance(found, int):
            keys = call.program.keys[found]
            found = _source_location.ArgumentArray(keys, call.arrays[found], searched[found])
        return None, found

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        return extra


class NonfiniteSearch:
    """A search for the first value that is not finite in what `fn` returns."""

    def __init__(self, fn: Callable[..., Any], masked: bool = False):
        self.fn = fn
        self._call = TransformedFunction(fn, _NonfiniteTransform(Plan.make(None, None), masked))
        self.arrays = self._call.arrays

    def traced_call(self, args: tuple[Any, ...]) -> TracedCall:
        """The traced function, and the arrays among these arguments."""
        return self._call.traced_call(args, {})

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Any] = ()
    ) -> Finding | None:
        """Search a call of the function, on the arrays `inputs` if they are given."""
        place = self._call(list(inputs), args, kwargs)
        if isinstance(place, _source_location.ArgumentArray):
            name = ArgumentNames(self.fn, args, kwargs).name(place.keys, place.array)
            return describe_value("argument", name, place.searched)
        if place is None or isinstance(place, Finding):
            return place

        def trace(plan: Plan) -> TracedCall:
            search = TransformedFunction(self.fn, _NonfiniteTransform(plan, False))
            return search.traced_call(args, kwargs)

        return place.describe(trace)
