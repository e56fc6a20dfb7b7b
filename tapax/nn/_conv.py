"""BatchEnsemble of `nnx.Conv`: `r` is on the input channels, `s` on the output channels."""

import inspect
from typing import Any

import jax
from flax import nnx

from tapax.nn._factors import BaseLayer, EnsembleLayer, LayerShapes
from tapax.nn._member_rows import check_stack, check_width, modulate

# A capture replaces this method while it traces.
_conv = inspect.unwrap(nnx.Conv.__call__)


def _get_shapes(base: Any) -> LayerShapes:
    ins, outs = base.in_features, base.out_features
    return LayerShapes(tuple(base.kernel_shape), (ins,), (outs,), (outs,))


class BatchEnsembleConv(EnsembleLayer, nnx.Conv):
    """A convolution of several members, in any number of dimensions.

    Member `k` has the kernel `kernel * outer(r_k, s_k)` over channels; every channel has a factor,
    in grouped convolutions, too. Strides, dilations, padding, groups, mask, dtype and precision are
    those of the base layer.

    Args:
        base_layer: The `nnx.Conv` to convert. It stays as it is.
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
        TypeError: If `base_layer` is not a plain `nnx.Conv`, or `rngs` not a source of keys.
        ValueError: If an option is out of range, or if stacked weights are not stacked along the
            first axes.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from tapax import nn
        >>> base = nnx.Conv(3, 8, (3, 3), strides=2, rngs=nnx.Rngs(0))
        >>> layer = nn.BatchEnsembleConv(base, rngs=1, num_members=4)
        >>> layer(jax.random.normal(jax.random.key(0), (4 * 5, 10, 10, 3))).shape
        (20, 5, 5, 8)
    """

    base = BaseLayer(nnx.Conv, _get_shapes)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Compute the results of all members, `[E * B, *spatial, out_features]`."""
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
