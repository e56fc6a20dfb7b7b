"""BatchEnsemble of `nnx.Linear` and `nnx.LinearGeneral`, the projections of attention."""

import inspect
import math
from typing import Any

import jax
from flax import nnx

from tapax.nn._factors import BaseLayer, EnsembleLayer, LayerShapes
from tapax.nn._member_rows import check_stack, check_width, modulate

# A capture replaces these methods while it traces.
_linear = inspect.unwrap(nnx.Linear.__call__)
_linear_general = inspect.unwrap(nnx.LinearGeneral.__call__)


def _get_shapes(base: Any) -> LayerShapes:
    ins, outs = base.in_features, base.out_features
    return LayerShapes((ins, outs), (ins,), (outs,), (outs,))


class BatchEnsembleLinear(EnsembleLayer, nnx.Linear):
    """A linear layer of several members, each with the weight `W * outer(r_k, s_k)`.

    It computes `y = ((x * r_k) @ kernel) * s_k + bias_k` for the rows `[k * B, (k + 1) * B)` of a
    batch `[E * B, ..., in_features]`, in the dtype and precision of the base layer.

    It has all attributes of the base layer, and `num_members`, `r` of shape
    `[num_members, in_features]`, `s` of shape `[num_members, out_features]`, and a `bias` of shape
    `[num_members, out_features]`, or None.

    Args:
        base_layer: The `nnx.Linear` to convert. It stays as it is.
        rngs: An `nnx.Rngs`, from whose stream `params` the layer draws; an `nnx.RngStream`; or a
            seed or a key, which is combined with the weights of the base layer, so that layers made
            with one seed have different factors.
        num_members: The number of members.
        use_base_weights: Whether to use the kernel of the base layer, the variable itself. By
            default the layer draws a new kernel; `batch_ensemble` keeps the weights by default.
        init: The distribution of `r` and `s`: `"normal"` or `"random_sign"`.
        r_mean: The mean of `r`, for `"normal"`.
        r_std: The standard deviation of `r`, for `"normal"`.
        s_mean: The mean of `s`, for `"normal"`.
        s_std: The standard deviation of `s`, for `"normal"`.

    Raises:
        TypeError: If `base_layer` is not a plain `nnx.Linear`, or `rngs` not a source of keys.
        ValueError: If an option is out of range, or if stacked weights are not stacked along the
            first axes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from tapax import nn
        >>> base = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> layer = nn.BatchEnsembleLinear(base, rngs=1, num_members=4)
        >>> x = jax.random.normal(jax.random.key(0), (4 * 5, 3))  # 5 rows for each member
        >>> layer(x).shape
        (20, 2)
        >>> jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(layer)))
        {'bias': (4, 2), 'kernel': (3, 2), 'r': (4, 3), 's': (4, 2)}
    """

    base = BaseLayer(nnx.Linear, _get_shapes)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Compute the results of all members, `[E * B, ..., out_features]`."""
        check_stack(self, (self.in_features,))
        last = max(inputs.ndim - 1, 1)
        check_width(self, inputs, (last,), (self.in_features,))
        run = lambda layer, x: _linear(layer, x, out_sharding)  # noqa: E731
        return modulate(self, inputs, run, (last,), (-1,))


def _get_general_shapes(base: Any) -> LayerShapes:
    if base.batch_axis:
        raise ValueError(
            "`base_layer` of BatchEnsembleLinearGeneral must have no batch_axis, but has "
            f"{dict(base.batch_axis)}: each of its rows has different weights, so members cannot "
            "share them."
        )
    ins, outs = base.in_features, base.out_features
    # Flax draws the kernel as if all input axes were one axis, and all output axes another.
    flat = math.prod(ins), math.prod(outs)
    return LayerShapes((*ins, *outs), ins, outs, outs, flat)


class BatchEnsembleLinearGeneral(EnsembleLayer, nnx.LinearGeneral):
    """A linear layer over several axes, such as those of attention, of several members.

    `nnx.MultiHeadAttention` has such layers. `r` has the shape `[num_members, *in_features]`, `s`
    and the bias `[num_members, *out_features]`.

    Args:
        base_layer: The `nnx.LinearGeneral` to convert. It stays as it is.
        rngs: An `nnx.Rngs`, from whose stream `params` the layer draws; an `nnx.RngStream`; or a
            seed or a key, which is combined with the weights of the base layer, so that layers made
            with one seed have different factors.
        num_members: The number of members.
        use_base_weights: Whether to use the kernel of the base layer, the variable itself. By
            default the layer draws a new kernel; `batch_ensemble` keeps the weights by default.
        init: The distribution of `r` and `s`: `"normal"` or `"random_sign"`.
        r_mean: The mean of `r`, for `"normal"`.
        r_std: The standard deviation of `r`, for `"normal"`.
        s_mean: The mean of `s`, for `"normal"`.
        s_std: The standard deviation of `s`, for `"normal"`.

    Raises:
        TypeError: If `base_layer` is not a plain `nnx.LinearGeneral`, or `rngs` is not a source of
            keys.
        ValueError: If an option is out of range, or if stacked weights are not stacked along the
            first axes.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from tapax import nn
        >>> base = nnx.LinearGeneral(6, (2, 3), rngs=nnx.Rngs(0))
        >>> layer = nn.BatchEnsembleLinearGeneral(base, rngs=1, num_members=4)
        >>> layer(jax.random.normal(jax.random.key(0), (4 * 5, 7, 6))).shape
        (20, 7, 2, 3)
    """

    base = BaseLayer(nnx.LinearGeneral, _get_general_shapes)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Compute the results of all members, `[E * B, ..., *out_features]`."""
        check_stack(self, self.in_features)
        # Flax sorts the axes: the first axis of the kernel belongs to the first of them.
        axes = sorted(a + inputs.ndim if a < 0 else a for a in self.axis)
        check_width(self, inputs, axes, self.in_features)
        if 0 in axes:
            raise ValueError(
                f"`inputs` of BatchEnsembleLinearGeneral has the shape {list(inputs.shape)}, but "
                f"the layer is applied along the axes {list(self.axis)}, and the first axis must "
                "contain the rows of the members."
            )
        outs = range(-len(self.out_features), 0)
        run = lambda layer, x: _linear_general(layer, x, out_sharding)  # noqa: E731
        return modulate(self, inputs, run, axes, outs)
