"""`find_nonfinite`: the origin of the first NaN or infinity that reaches a result.

>>> import jax, jax.numpy as jnp, tapax
>>> @jax.jit
... def f(x):
...     return jax.lax.scan(lambda c, x: (c + jnp.log(x), None), 0.0, x)[0]
>>> found = tapax.find_nonfinite(f)(jnp.array([1.0, 2.0, -1.0, 3.0]))
>>> found.operation, found.iterations, found.kind
('log', (2,), 'nan')
>>> tapax.find_nonfinite(f)(jnp.array([1.0, 2.0, 3.0])) is None
True

A search has three compiled passes. The first runs the function unchanged, with a flag that tells
whether a result is bad; if all results are finite, this is the whole cost. The second carries an
origin with every value (`_origins`), and returns one place: an equation, and the iterations of the
loops around it. The third measures the equation at that place (`_measurement`).

If a program raises at a bad value, because of `equinox.error_if` or `jax_debug_nans`, the search
returns the finding instead of the error. If it raises for another reason, so does the search.

A value that the program masks, as by `where`, or swallows, as by `1 / inf`, is not reported;
neither is a constant such as the `-inf` of a mask. The NaN of `inf - inf` is reported. An argument
that is not finite and reaches a result is reported as the operation `"argument"`, if the program
makes no other bad value; a constant as `"constant"`. A bad value may also decide a predicate, an
index or bits, and these bring a bad constant or a NaN: the origin of `where(isnan(y), nan, y)` is
that of `y`.

Sharp edges: an origin belongs to a whole array. Where two faults meet in one array, the search
assumes that the earlier fault caused the bad result. The search does not follow a bad value that
only decides when a while loop ends. Iterations count from 0 in the order of the indices: a backward
pass that runs from the last layer to the first has the numbers of the forward pass.
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
    """Make a function that finds the operation behind the first NaN or infinity in a call of `fn`.

    The search runs `fn` without updating any object or donating any argument. The state that `fn`
    updates counts as a result. A NaN or an infinity that the program masks or swallows is not a
    finding, nor is an infinite constant, such as the `-inf` of a mask, that no result shows. If
    `fn` raises because of a bad value, the search returns the finding; other errors propagate.

    If two faults meet in one array, the search assumes that the earlier fault caused the bad
    result.

    Args:
        fn: The function to search, jitted or not: a train step, a loss, a model.
        masked: Whether to report bad values that reach no result, too.

    Returns:
        A function of the arguments of `fn`. It returns a `Finding`, or None if there is nothing to
        report: without `masked`, if all results are finite.

    Raises:
        TypeError: If `fn` is not a function, or `masked` is not a bool. When the returned function
            is called: if the call is inside a transformation such as `jax.jit`.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> @jax.jit
        ... def f(x):
        ...     return jax.lax.scan(lambda c, x: (c + jnp.log(x), None), 0.0, x)[0]
        >>> found = tapax.find_nonfinite(f)(jnp.array([1.0, 2.0, -1.0, 3.0]))
        >>> found.operation, found.loops, found.iterations, found.kind
        ('log', ('scan[4]',), (2,), 'nan')
        >>> tapax.find_nonfinite(f)(jnp.array([1.0, 2.0, 3.0])) is None
        True

        A masked NaN counts only on request:

        >>> g = lambda x: jnp.where(x > 0, jnp.log(x), 0.0)
        >>> tapax.find_nonfinite(g)(jnp.array([-1.0])) is None
        True
        >>> tapax.find_nonfinite(g, masked=True)(jnp.array([-1.0])).operation
        'log'
    """
    check_function(fn, "find_nonfinite", returns_function=False)
    if not isinstance(masked, bool):
        raise TypeError(f"`masked` must be True or False, but is {masked!r}.")
    search = NonfiniteSearch(fn, masked)

    @functools.wraps(fn, updated=())
    def find(*args: P.args, **kwargs: P.kwargs) -> Finding | None:
        return search.find(args, kwargs)

    return find


@dataclasses.dataclass(frozen=True)
class _NonfiniteTransform(Transform):
    """The transform that finds the first bad value of the results; it updates no object.

    Its operands, if any, are the arrays on which to search instead of the arrays of the call.
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
    """A search for the first value that is not finite in the results of `fn`."""

    def __init__(self, fn: Callable[..., Any], masked: bool = False):
        self.fn = fn
        self._call = TransformedFunction(fn, _NonfiniteTransform(Plan.make(None, None), masked))
        self.arrays = self._call.arrays

    def traced_call(self, args: tuple[Any, ...]) -> TracedCall:
        """Return the traced function, and the arrays among `args`."""
        return self._call.traced_call(args, {})

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Any] = ()
    ) -> Finding | None:
        """Search a call of the function, on the arrays `inputs` if given."""
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
