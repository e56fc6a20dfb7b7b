"""How arguments are seen: which of a call's leaves are traced, and which are static.

In a plain Python function arrays and numbers are traced; bools, strings, callables and other
objects are static. A number whose value the function needs while it is traced, for a `range` or an
`if`, becomes static too: which ones is found by trying, once for each structure of arguments.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from tapax._jax import Function, PyTree, Value, pytrees
from tapax._jax.pytrees import unflatten_in_order
from tapax._jaxpr.restage import is_eager
from tapax._sites import name_of

_NUMBERS: tuple[type[Any], ...] = (int, float, complex, np.generic)
_ARRAYS: tuple[type[Any], ...] = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
# What is raised where a traced number is used as a shape, an index, a condition or a key: errors of
# JAX's, which are TypeErrors, and Python's own.
_NEEDS_A_VALUE = (TypeError, LookupError, ValueError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Signature:
    """The static half of a call: its structure, and its static leaves with their places.

    It is `is_repeatable` if equal signatures mean equal calls. They do not where an object is
    compared by its identity, since it may have changed in between.
    """

    treedef: Any
    statics: tuple[tuple[int, Any, Any], ...]
    is_repeatable: bool = False
    order: Any = None

    def join(self, arrays: Sequence[Any]) -> Any:
        """The arguments that the leaves were taken from, with other arrays in their places."""
        leaves = list(arrays)
        for i, leaf, _ in self.statics:
            leaves.insert(i, leaf)
        return unflatten_in_order(self.treedef, leaves, self.order)

    def traced(self, leaves: Sequence[Any]) -> list[Any]:
        """Of something for every leaf, what there is for those that are traced."""
        fixed = {i for i, _, _ in self.statics}
        return [leaf for i, leaf in enumerate(leaves) if i not in fixed]


@dataclasses.dataclass(frozen=True)
class FlatArguments:
    """The leaves of some arguments, their structure, and the order of the keys of their dicts."""

    leaves: list[Value]
    treedef: Any
    order: Any

    @classmethod
    def of(cls, arguments: PyTree) -> FlatArguments:
        return cls(*pytrees.flatten_in_order(arguments))


def split(
    fn: Function, arguments: FlatArguments, needed: frozenset[int]
) -> tuple[Signature, list[Any]]:
    """Splits the arguments of `fn` into their static half and their arrays.

    `needed` are the places of numbers that are static because the function needs their values.
    """
    arrays: list[Value] = []
    statics: list[tuple[int, Any, Any]] = []
    for i, leaf in enumerate(arguments.leaves):
        if _is_traced(leaf) and not (i in needed and isinstance(leaf, _NUMBERS)):
            arrays.append(leaf)
            continue
        try:
            hash(leaf)
        except TypeError:
            raise TypeError(
                f"An argument of {name_of(fn)} holds {leaf!r}, of type {type(leaf).__name__}, "
                "which is neither an array or a number, to be traced, nor hashable, to be kept "
                "fixed. Close over it (functools.partial), or make its class a pytree."
            ) from None
        # 0.0 equals -0.0, and True equals 1.
        statics += [(i, leaf, repr(leaf) if isinstance(leaf, (float, complex)) else type(leaf))]
    is_repeatable = all(map(_is_value, (leaf for _, leaf, _ in statics)))
    return Signature(arguments.treedef, tuple(statics), is_repeatable, arguments.order), arrays


def split_traced(arguments: PyTree) -> tuple[Signature, list[Value]]:
    """Splits the arguments of a jitted function: tracers are traced, everything else is static.

    Under `jax.disable_jit()` there are no tracers, so arrays count as traced.
    """
    leaves, treedef = pytrees.flatten(arguments)
    kinds = (jax.Array, np.ndarray) if is_eager() else Tracer
    statics = ((i, leaf, None) for i, leaf in enumerate(leaves) if not isinstance(leaf, kinds))
    signature = Signature(treedef, tuple(statics))
    return signature, signature.traced(leaves)


def _is_value(leaf: PyTree) -> bool:
    """Whether an object stays what it is; functions are taken to, as `jax.jit` does."""
    return (
        callable(leaf) or isinstance(leaf, enum.Enum) or type(leaf).__hash__ is not object.__hash__
    )


def _is_traced(leaf: PyTree) -> bool:
    if isinstance(leaf, (bool, str, bytes, enum.Enum)) or callable(leaf):
        return False
    if isinstance(leaf, _ARRAYS):
        return leaf.dtype != object
    if isinstance(leaf, int) and not -(2**31) <= leaf < 2**31:
        return False  # it has no type of JAX's, unless 64 bits are enabled
    return isinstance(leaf, _NUMBERS) or hasattr(leaf, "__jax_array__")


def numbers(arguments: PyTree) -> list[int]:
    """The places of the leaves that are single numbers, which a function may need the value of."""
    leaves = jax.tree.leaves(arguments)
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, _NUMBERS) and _is_traced(leaf)]


def places_in(arguments: PyTree, parts: Callable[[Any], bool]) -> frozenset[int]:
    """The places of the leaves in some parts of `arguments`, but for numbers of NumPy's."""
    places: list[int] = []
    start = 0
    for node in jax.tree.leaves(arguments, is_leaf=parts):
        leaves = jax.tree.leaves(node)
        if parts(node):
            places += [start + i for i, x in enumerate(leaves) if not isinstance(x, np.generic)]
        start += len(leaves)
    return frozenset(places)


def find_needed(
    trace: Callable[[frozenset[int]], Any], candidates: Sequence[int], known: frozenset[int]
) -> tuple[frozenset[int], Any]:
    """The fewest numbers that must be static for `trace` to succeed, and what it then returns.

    All are tried as static; then each is let go that is not needed.
    """
    candidates = [place for place in candidates if place not in known]
    try:
        return known, trace(known)
    except _NEEDS_A_VALUE as error:
        if not candidates:
            raise
        first = error
    needed = known | frozenset(candidates)
    try:
        result = trace(needed)
    except _NEEDS_A_VALUE:
        raise first from None  # it is not for want of a value
    for place in candidates:
        try:
            result = trace(needed - {place})
        except _NEEDS_A_VALUE:
            continue
        needed -= {place}
    return needed, result
