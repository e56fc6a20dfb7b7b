"""BatchEnsemble of `nnx.Conv`: `r` is on the input channels, `s` on the output channels."""

import inspect
from typing import Any

import jax
from flax import nnx

from tapax.nn._factors import BaseLayer, EnsembleLayer, LayerShapes
from tapax.nn._member_rows import check_stack, check_width, modulate

# A capture puts its own function in the place of this one while it traces.
_conv = inspect.unwrap(nnx.Conv.__call__)


def _get_shapes(base: Any) -> LayerShapes:
    ins, outs = base.in_features, base.out_features
    return LayerShapes(tuple(base.kernel_shape), (ins,), (outs,), (outs,))


class BatchEnsembleConv(EnsembleLayer, nnx.Conv):
    """A convolution of several members, in any number of dimensions.

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> base = nnx.Conv(3, 8, (3, 3), strides=2, rngs=nnx.Rngs(0))
    >>> layer = BatchEnsembleConv(base, rngs=1, num_members=4)
    >>> layer(jnp.ones((4 * 5, 10, 10, 3))).shape
    (20, 5, 5, 8)

    Member `k` has the kernel `kernel * outer(r_k, s_k)` over channels; in a convolution of groups
    every channel has its own factor all the same. Strides, dilations, padding, groups, mask, dtype
    and precision are those of the base layer; arguments are as for `BatchEnsembleLinear`.
    """

    base = BaseLayer(nnx.Conv, _get_shapes)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The results of all members, `[E * B, *spatial, out_features]`."""
        check_stack(self, (self.in_features,))
        spatial = len(self.kernel_size)
        if inputs.ndim < spatial + 2:
            raise ValueError(
                f"`inputs` of BatchEnsembleConv has the shape {list(inputs.shape)}, but must have "
                f"an axis of rows, {spatial} spatial axes and one of channels."
            )
        last = inputs.ndim - 1
        check_width(self, inputs, (last,), (self.in_features,), "channels")
        run = lambda layer, x: _conv(layer, x, out_sharding)  # noqa: E731
        return modulate(self, inputs, run, (last,), (-1,))
