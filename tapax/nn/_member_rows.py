"""Members of a layer and the rows of a batch: `[E * B, ...]`, one member after the other.

Layers repeat factors for each row, and never split rows into members. So an array that is sharded
by rows keeps its sharding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax._frameworks.interface import Module
from tapax._jax import PyTree, Value


class BiaslessLayer:
    """A view of a layer without its bias, on which the method of its base class runs.

    That method would add a bias without an axis of members, and before the factor `s`.
    """

    bias = None
    use_bias = False

    def __init__(self, layer: Module):
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def count_rows(layer: Module, inputs: PyTree, argument: str = "inputs") -> int:
    """Count the rows of a batch for each member."""
    members = layer.num_members
    if inputs.ndim == 0 or inputs.shape[0] % members:
        rows = f"{inputs.shape[0]} rows" if inputs.ndim else "no rows"
        raise ValueError(
            f"`{argument}` of {type(layer).__name__} has the shape {list(inputs.shape)}, {rows}, "
            f"but the number of rows must be a multiple of num_members={members}: one member after "
            "the other, as tapax.nn.tile makes them."
        )
    return inputs.shape[0] // members


def check_width(
    layer: Module,
    x: Value,
    axes: Sequence[int],
    size: Sequence[int],
    what: str = "features",
    argument: str = "inputs",
) -> None:
    """Refuse inputs whose number of features differs from that of the layer."""
    found = tuple(x.shape[a] for a in axes) if all(0 <= a < x.ndim for a in axes) else None
    if found != tuple(size):
        wide = size[0] if len(size) == 1 else list(size)
        where = f"axis {axes[0]}" if len(axes) == 1 else f"the axes {list(axes)}"
        raise ValueError(
            f"`{argument}` of {type(layer).__name__} has the shape {list(x.shape)}, but must have "
            f"{wide} {what} along {where}."
        )


def check_stack(layer: Module, shape: Sequence[int]) -> None:
    """Refuse to run a stack of layers as a single layer."""
    if tuple(layer.r.shape) != (layer.num_members, *shape):
        raise ValueError(
            f"The factor `r` of {type(layer).__name__} has the shape {list(layer.r.shape)}, but "
            f"one layer has {[layer.num_members, *shape]}. Run a stack of layers under nnx.scan or "
            "nnx.vmap."
        )


def spread_rows(factor: Any, batch: int, ndim: int, axes: Sequence[int]) -> jax.Array:
    """Repeat a factor of the members, `[E, ...]`, for rows, to broadcast with an array of `ndim`.

    `axes` are the positions of the axes of the factor in that array; the first is the axis of rows.
    """
    members, *shape = factor.shape
    each = jnp.broadcast_to(factor[:, None], (members, batch, *shape))
    each = each.reshape(members * batch, *shape)
    each = each.transpose(sorted(range(len(axes)), key=lambda i: axes[i]))
    return jnp.expand_dims(each, [a for a in range(ndim) if a not in axes])


def modulate(
    layer: Module,
    inputs: jax.Array,
    run: Callable[[Any, jax.Array], jax.Array],
    ins: Sequence[int],
    outs: Sequence[int],
    row: int = 0,
) -> jax.Array:
    """Compute `run(x * r) * s + bias`, in the precision of the base layer.

    `r` scales the axes `ins` of the inputs; `s` scales the axes `outs` of the result, counted from
    the end. `row` is the axis of the rows in the result.
    """
    batch = count_rows(layer, inputs)
    weights = layer.kernel[...], None if layer.bias is None else layer.bias[...]
    x, _, bias = layer.promote_dtype((inputs, *weights), dtype=layer.dtype)
    r, s = layer.r[...], layer.s[...]
    x = x * spread_rows(r.astype(x.dtype), batch, x.ndim, (0, *ins))
    y = run(BiaslessLayer(layer), x)
    where = (row, *(y.ndim + a for a in outs))
    y = y * spread_rows(s.astype(y.dtype), batch, y.ndim, where)
    if bias is None:
        return y
    return y + spread_rows(bias.reshape(s.shape).astype(y.dtype), batch, y.ndim, where)
