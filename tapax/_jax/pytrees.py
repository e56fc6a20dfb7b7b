"""Pytrees: dicts in their original key order, which JAX sorts, and leaves that are not arrays."""

import dataclasses
import typing
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, TypeVarTuple

import jax

from tapax._jax.types import PyTree, Value

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Functions of JAX with complete types: see `typed`.
flatten: Callable[[PyTree], tuple[list[Value], Any]] = jax.tree.flatten
structure: Callable[[PyTree], Any] = jax.tree.structure
leaves_with_path: Callable[[PyTree], list[tuple[Any, Value]]] = jax.tree.leaves_with_path
keystr: Callable[..., str] = jax.tree_util.keystr


def map_leaves(fn: Callable[[*Ts], Any], *trees: *Ts) -> Any:
    """Apply `jax.tree.map`, with the type of `fn`, which JAX leaves open."""
    return jax.tree.map(fn, *trees)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static(Generic[T]):
    """A pytree without leaves, which carries a Python object out of a function that JAX traces.

    All instances are equal, because JAX compares the structures of consecutive iterations when it
    evaluates a loop eagerly.
    """

    value: T

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static)

    def __hash__(self) -> int:
        return hash(Static)


def order_of(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return the keys of every dict in a structure, in order; None if all are sorted, as in JAX."""
    return _order(_flatten(tree, is_leaf)[2])


def flatten_in_order(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Value], Any, Any]:
    """Flatten a structure, and return its leaves, its treedef and its `order_of`."""
    leaves, treedef, dicts = _flatten(tree, is_leaf)
    return leaves, treedef, _order(dicts)


def _order(dicts: list[dict[Any, Any]]) -> Any:
    if all(list(found) == sorted(found) for found in dicts):
        return None
    return tuple(map(tuple, dicts))


def unflatten_in_order(treedef: Any, leaves: Iterable[Any], order: Any) -> Any:
    """Make a structure from its leaves, with the keys of its dicts in the order `order`."""
    leaves = list(leaves)
    tree = treedef.unflatten(leaves)
    if order is not None:
        ids = set(map(id, leaves))
        # JAX has just made these dicts. Their containers may be frozen, so change them in place.
        dicts = _flatten(tree, lambda x: id(x) in ids)[2]
        for made, keys in zip(dicts, order, strict=True):
            made.update({key: made.pop(key) for key in keys})
    return tree


def _flatten(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Value], Any, list[dict[Any, Any]]]:
    """Flatten a structure, and list its dicts in the order in which JAX flattens them."""
    dicts: list[dict[Any, Any]] = []

    def visit(x: Any) -> bool:
        if is_leaf is not None and is_leaf(x):
            return True
        if type(x) is dict:
            dicts.append(x)
        return False

    leaves, treedef = jax.tree.flatten(tree, is_leaf=visit)
    return leaves, treedef, dicts


def map_in_order(
    fn: Callable[..., Any], tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply `jax.tree.map` to one structure, and keep the key order of its dicts."""
    leaves, treedef, dicts = _flatten(tree, is_leaf)
    return unflatten_in_order(treedef, map(fn, leaves), _order(dicts))


def map_with_path(
    fn: Callable[[tuple[Any, ...], Any], Any],
    tree: PyTree,
    is_leaf: Callable[[Any], bool],
    path: tuple[Any, ...] = (),
) -> Any:
    """Apply `jax.tree_util.tree_map_with_path`, but rebuild only nodes with changed leaves.

    Rebuilding a node loses the attributes that its class does not declare to JAX. Dicts keep the
    order of their keys.
    """
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    children, treedef = typing.cast(tuple[list[tuple[Any, Value]], Any], flat)
    if is_leaf(tree) or jax.tree_util.treedef_is_leaf(treedef):
        return fn(path, tree)
    new = [map_with_path(fn, child, is_leaf, path + keys) for keys, child in children]
    if all(after is before for after, (_, before) in zip(new, children, strict=True)):
        return tree
    made = treedef.unflatten(new)
    return {key: made[key] for key in tree} if type(tree) is dict else made


@dataclasses.dataclass(frozen=True)
class ValueStructure:
    """The structure of a value: everything but its arrays.

    `fixed` are the leaves that are not arrays, with their indices; `order` is the order of the keys
    of dicts; `count` is the number of arrays.
    """

    treedef: Any
    fixed: tuple[tuple[int, Any], ...] = dataclasses.field(hash=False)
    order: Any
    count: int

    def join(self, arrays: Iterable[Any]) -> Any:
        """Build the value from `arrays`; ignore the placeholder of a value without arrays."""
        leaves = list(arrays)[: self.count]
        for i, leaf in self.fixed:
            leaves.insert(i, leaf)
        return unflatten_in_order(self.treedef, leaves, self.order)


def split_arrays(
    value: PyTree, is_array: Callable[[Value], bool]
) -> tuple[list[Value], ValueStructure]:
    """Split a value into its arrays and its structure."""
    leaves, treedef, order = flatten_in_order(value)
    arrays = [x for x in leaves if is_array(x)]
    fixed = tuple((i, x) for i, x in enumerate(leaves) if not is_array(x))
    return arrays, ValueStructure(treedef, fixed, order, len(arrays))
