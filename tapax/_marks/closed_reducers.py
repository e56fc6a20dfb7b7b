"""Reducers that close over traced values: a parameter, or a module that holds some.

A fold runs after the trace that such values belong to is over. So what the reducer does is traced
where the mark is, and the values that it closes over are marked along with the sown value.
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
    """What a reducer does to the first value, and to a state and the next one.

    Both programs take what the reducer closes over before the rest. In a marked value it comes
    after the `count` arrays of the sown one, and that of the second program begins at `starts`.
    `following` is None for a state whose structure or types change from call to call.
    `code` is what the reducer says, whatever it closes over.
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
        own, closed = arrays[: self.count], arrays[self.count :]
        if state is _NOTHING:
            return self._run(self.first, [*closed[: self.starts], *own])
        before, structure = split_arrays(state, _is_any)
        if self.following is None:
            raise SiteError(
                "A reducer that closes over a traced value must return what it is given, with the "
                "same structure, shapes and dtypes, but this one returns something else at every "
                "call. Let it keep the values as they are, and compute with them afterwards."
            )
        if structure != self.state:
            raise SiteError(
                "A reducer that closes over a traced value is given what another has made, which "
                "has another structure. Sow the values under names of their own."
            )
        return self._run(self.following, [*closed[self.starts :], *before, *own])

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
    """The reducer without the traced values that it closes over, and these; None if it has none."""

    def begin(*xs: Value) -> Any:
        return _split(reduce(init(), structure.join(xs)))

    def go_on(state: Sequence[Value], *xs: Value) -> Any:
        return _split(reduce(made.value.join(state), structure.join(xs)))

    try:
        with without_marks():
            first, (types, made) = typed.make_jaxpr(begin, return_shape=True)(*arrays)
            following, (again, then) = typed.make_jaxpr(go_on, return_shape=True)(types, *arrays)
    except Exception:  # it is not for arrays alone
        return None
    (first, before), (following, after) = map(_jax.closed, (first, following))
    if not any(isinstance(x, Tracer) for x in (*before, *after)):
        return None
    same = made.value == then.value and list(map(_type, types)) == list(map(_type, again))
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
