"""Pytrees whose dicts keep the order of their keys, which JAX sorts."""

from collections.abc import Callable
from typing import Any

import jax


def order_of(tree: Any) -> Any:
    """The order of the keys in the dicts of a structure, which JAX sorts; None if it is sorted."""
    if type(tree) is dict:
        inner = tuple(map(order_of, tree.values()))
        if not any(inner) and list(tree) == sorted(tree, key=str):
            return None
        return dict, tuple(tree), inner
    if type(tree) in (list, tuple):
        inner = tuple(map(order_of, tree))
        return (list, None, inner) if any(inner) else None
    return None


def in_order(tree: Any, order: Any) -> Any:
    """A structure with the keys of its dicts in an order."""
    if order is None:
        return tree
    kind, keys, inner = order
    if kind is dict:
        return {k: in_order(tree[k], o) for k, o in zip(keys, inner, strict=True)}
    return type(tree)(in_order(t, o) for t, o in zip(tree, inner, strict=True))


def map_in_order(fn: Callable[..., Any], tree: Any, is_leaf: Any = None) -> Any:
    """`jax.tree.map` over one structure, whose dicts keep the order of their keys."""
    return in_order(jax.tree.map(fn, tree, is_leaf=is_leaf), order_of(tree))
