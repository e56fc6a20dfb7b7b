"""Batches of members: `tile`, `fold` and `unfold` convert between batches and members.

Each function takes an array or a pytree of arrays. `E` is the number of members, `B` the number of
rows of each member.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tapax._jax import Value
from tapax.nn._arguments import check_members


def fold(x: Value) -> Any:
    """Reshape `[E, B, ...]` to `[E * B, ...]`, the batch that a BatchEnsemble layer takes.

    Args:
        x: An array with an axis of members and an axis of rows, or a pytree of such arrays.

    Returns:
        An array `[E * B, ...]`, one member after the other, or a pytree of these.

    Raises:
        ValueError: If an array has fewer than two axes.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> tapax.nn.fold(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [1.0, 2.0, 3.0, 4.0]
    """

    def leaf(x: Value) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim < 2:
            raise ValueError(
                f"`x` of `fold` must have an axis of members and an axis of rows, but has the "
                f"shape {list(x.shape)}."
            )
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return jax.tree.map(leaf, x)


def unfold(x: Value, num_members: int) -> Any:
    """Reshape `[E * B, ...]` to `[E, B, ...]`, to split a batch by member.

    Args:
        x: An array of the rows of all members, one member after the other, or a pytree of these.
        num_members: The number of members.

    Returns:
        An array `[E, B, ...]`, or a pytree of these.

    Raises:
        TypeError: If `num_members` is not an integer.
        ValueError: If the number of rows is not a multiple of `num_members`.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> tapax.nn.unfold(jnp.array([1.0, 2.0, 3.0, 4.0]), 2).tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    members = check_members(num_members)

    def leaf(x: Value) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim == 0 or x.shape[0] % members:
            raise ValueError(
                f"`x` of `unfold` has the shape {list(x.shape)}, but its first axis must be a "
                f"multiple of num_members={members}."
            )
        return x.reshape(members, x.shape[0] // members, *x.shape[1:])

    return jax.tree.map(leaf, x)


def tile(x: Value, num_members: int) -> Any:
    """Repeat a plain batch `[B, ...]` once for each member, to `[E * B, ...]`.

    Args:
        x: A plain batch, or a pytree of these.
        num_members: The number of members.

    Returns:
        An array `[E * B, ...]`, or a pytree of these.

    Raises:
        TypeError: If `num_members` is not an integer.
        ValueError: If an array has no axis of rows.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> tapax.nn.tile(jnp.array([1.0, 2.0]), 3).tolist()
        [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    """
    members = check_members(num_members)

    def leaf(x: Value) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim == 0:
            raise ValueError("`x` of `tile` must have an axis of rows, but has the shape [].")
        each = jnp.broadcast_to(x, (members, *x.shape))
        return each.reshape(members * x.shape[0], *x.shape[1:])

    return jax.tree.map(leaf, x)
