"""Signatures, which divide the leaves of a call into traced and static ones.

In a plain Python function arrays and numbers are traced; bools, strings, callables and other
objects are static. A number whose value the function needs during tracing, for a `range` or an
`if`, is static too. `find_needed` finds such numbers by trial, once for each structure of
arguments.
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
# The errors of code that uses a traced number as a shape, an index, a condition or a key: JAX's
# errors, which are TypeErrors, and Python's.
_NEEDS_A_VALUE = (TypeError, LookupError, ValueError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Signature:
    """The static half of a call: its structure, and its static leaves with their positions.

    The signature `is_repeatable` if equal signatures mean equal calls. They do not if a static leaf
    is compared by identity, because the object may have changed between the calls.
    """

    treedef: Any
    statics: tuple[tuple[int, Any, Any], ...]
    is_repeatable: bool = False
    order: Any = None

    def join(self, arrays: Sequence[Any]) -> Any:
        """Join the static leaves and other arrays to arguments of the same structure."""
        leaves = list(arrays)
        for i, leaf, _ in self.statics:
            leaves.insert(i, leaf)
        return unflatten_in_order(self.treedef, leaves, self.order)

    def traced(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the elements of `leaves` at the positions of traced leaves."""
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
    """Split the arguments of `fn` into their static half and their arrays.

    `needed` has the positions of numbers that are static because `fn` needs their values.
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
                f"An argument of {name_of(fn)} contains {leaf!r}, of type {type(leaf).__name__}. "
                "It cannot be traced, because it is neither an array nor a number, nor be static, "
                "because it is not hashable. Close over it (functools.partial), or make its class "
                "a pytree."
            ) from None
        # 0.0 equals -0.0, and True equals 1.
        statics += [(i, leaf, repr(leaf) if isinstance(leaf, (float, complex)) else type(leaf))]
    is_repeatable = all(map(_is_value, (leaf for _, leaf, _ in statics)))
    return Signature(arguments.treedef, tuple(statics), is_repeatable, arguments.order), arrays


def split_traced(arguments: PyTree) -> tuple[Signature, list[Value]]:
    """Split the arguments of a jitted function: tracers are traced, everything else is static.

    Under `jax.disable_jit()` there are no tracers, so arrays count as traced.
    """
    leaves, treedef = pytrees.flatten(arguments)
    kinds = (jax.Array, np.ndarray) if is_eager() else Tracer
    statics = ((i, leaf, None) for i, leaf in enumerate(leaves) if not isinstance(leaf, kinds))
    signature = Signature(treedef, tuple(statics))
    return signature, signature.traced(leaves)


def _is_value(leaf: PyTree) -> bool:
    """Return whether an object counts as unchangeable; functions do, as in `jax.jit`."""
    return (
        callable(leaf) or isinstance(leaf, enum.Enum) or type(leaf).__hash__ is not object.__hash__
    )


def _is_traced(leaf: PyTree) -> bool:
    if isinstance(leaf, (bool, str, bytes, enum.Enum)) or callable(leaf):
        return False
    if isinstance(leaf, _ARRAYS):
        return leaf.dtype != object
    if isinstance(leaf, int) and not -(2**31) <= leaf < 2**31:
        return False  # JAX has no type for it, unless 64 bits are enabled
    return isinstance(leaf, _NUMBERS) or hasattr(leaf, "__jax_array__")


def numbers(arguments: PyTree) -> list[int]:
    """Return the positions of single numbers, whose values a function may need."""
    leaves = jax.tree.leaves(arguments)
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, _NUMBERS) and _is_traced(leaf)]


def places_in(arguments: PyTree, parts: Callable[[Any], bool]) -> frozenset[int]:
    """Return the positions of all leaves in some parts of `arguments`, except NumPy scalars."""
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
    """Find the fewest numbers that must be static for `trace` to succeed; return its result too.

    If `trace` fails with only `known` static, all `candidates` become static; then each becomes
    traced if `trace` still succeeds.
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
        raise first from None  # the values of numbers are not the cause
    for place in candidates:
        try:
            result = trace(needed - {place})
        except _NEEDS_A_VALUE:
            continue
        needed -= {place}
    return needed, result
