"""Reducers that close over traced values: a parameter, or a module with parameters.

The fold runs after the trace of these values has ended. So `sow` traces the reducer at the mark,
and marks the values that the reducer closes over together with the sown value.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from jax.core import Tracer

from tapax import _jax
from tapax._jax import Equation, Jaxpr, PyTree, Static, Value, typed
from tapax._jax.pytrees import ValueStructure, split_arrays
from tapax._jaxpr.evaluate import evaluate
from tapax._marks.context import without_marks
from tapax._marks.fingerprints import fingerprint
from tapax._sites import SiteError

_NOTHING = object()


@dataclasses.dataclass(frozen=True, eq=False)
class ClosedReducer:
    """A traced reducer: a program for the first value, and one for a state and the next value.

    The first inputs of both programs are the values that the reducer closes over. The marked value
    has the `count` arrays of the sown value, then the `starts` inputs of this kind of `first`, then
    the inputs of `following`. `following` is None if the structure or types of the state change
    from call to call. `code` is a fingerprint of the reducer without the values it closes over.
    """

    first: Jaxpr
    following: Jaxpr | None
    state: ValueStructure
    count: int
    starts: int
    code: Hashable

    def init(self) -> Any:
        return _NOTHING

    def reduce(self, state: PyTree, arrays: Sequence[Value]) -> Any:
        sown, closed = arrays[: self.count], arrays[self.count :]
        if state is _NOTHING:
            return self._run(self.first, [*closed[: self.starts], *sown])
        before, structure = split_arrays(state, _is_any)
        if self.following is None:
            raise SiteError(
                "A reducer that closes over a traced value must return a state with the structure, "
                "shapes and dtypes of the state it is given, but this reducer changes them at "
                "every call. Collect the values without the traced value, and compute with it "
                "afterwards."
            )
        if structure != self.state:
            raise SiteError(
                "A reducer that closes over a traced value is given the state of another reducer, "
                "which has another structure. Sow the values under different names."
            )
        return self._run(self.following, [*closed[self.starts :], *before, *sown])

    def _run(self, jaxpr: Jaxpr, args: Sequence[Value]) -> Any:
        return self.state.join(evaluate(jaxpr, args, _bind))


def _bind(number: int, eqn: Equation, values: list[Value]) -> list[Value]:
    del number
    return _jax.bind_equation(eqn, values)


def _is_any(x: Value) -> bool:
    del x
    return True


def close_reducer(
    reduce: Any, init: Any, arrays: Sequence[Value], structure: ValueStructure
) -> tuple[ClosedReducer, list[Value]] | None:
    """Separate a reducer from the traced values that it closes over; None if there are none."""

    def begin(*xs: Value) -> Any:
        return _split(reduce(init(), structure.join(xs)))

    def go_on(state: Sequence[Value], *xs: Value) -> Any:
        return _split(reduce(made.value.join(state), structure.join(xs)))

    try:
        with without_marks():
            first, (types, made) = typed.make_jaxpr(begin, return_shape=True)(*arrays)
            following, (later, then) = typed.make_jaxpr(go_on, return_shape=True)(types, *arrays)
    except Exception:  # JAX cannot trace the reducer
        return None
    (first, before), (following, after) = map(_jax.closed, (first, following))
    if not any(isinstance(x, Tracer) for x in (*before, *after)):
        return None
    same = made.value == then.value and list(map(_type, types)) == list(map(_type, later))
    code = fingerprint([getattr(function, "__code__", None) for function in (reduce, init)])
    closed = ClosedReducer(
        first, following if same else None, made.value, len(arrays), len(before), code
    )
    return closed, [*before, *after]


def _split(state: PyTree) -> Any:
    arrays, structure = split_arrays(state, _is_any)
    return [typed.asarray(x) for x in arrays], Static(structure)


def _type(x: Any) -> Any:
    return x.shape, x.dtype
