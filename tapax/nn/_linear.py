"""BatchEnsemble of `nnx.Linear` and `nnx.LinearGeneral`, the projections of attention."""

import inspect
import math
from typing import Any

import jax
from flax import nnx

from tapax.nn._factors import BaseLayer, EnsembleLayer, LayerShapes
from tapax.nn._member_rows import check_stack, check_width, modulate

# A capture puts its own function in the place of this one while it traces.
_linear = inspect.unwrap(nnx.Linear.__call__)
_linear_general = inspect.unwrap(nnx.LinearGeneral.__call__)


def _get_shapes(base: Any) -> LayerShapes:
    ins, outs = base.in_features, base.out_features
    return LayerShapes((ins, outs), (ins,), (outs,), (outs,))


class BatchEnsembleLinear(EnsembleLayer, nnx.Linear):
    """A linear layer of several members, each with the weight `W * outer(r_k, s_k)`.

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> layer = BatchEnsembleLinear(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), rngs=1, num_members=4)
    >>> layer(jnp.ones((4 * 5, 3))).shape  # the rows of each member after those of the other
    (20, 2)
    >>> jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(layer)))
    {'bias': (4, 2), 'kernel': (3, 2), 'r': (4, 3), 's': (4, 2)}

    `y = ((x * r_k) @ kernel) * s_k + bias_k` for the rows `[k * B, (k + 1) * B)` of a batch
    `[E * B, ..., in_features]`, in the dtype and precision of the base layer.

    Attributes: `kernel`, `bias` of shape `[num_members, out_features]` or None, `in_features`,
    `out_features`, `use_bias`, `num_members`, `r` of shape `[num_members, in_features]`, `s` of
    shape `[num_members, out_features]`, and what else the base layer has.

    Arguments:

    - `base_layer`: the `nnx.Linear` that it is made from, which stays as it is.
    - `rngs`: an `nnx.Rngs`, whose stream `params` is drawn from; an `nnx.RngStream`; a seed or a
      key, which is joined with the base layer's own weights, so that layers made with one seed
      have factors of their own.
    - `use_base_weights`: the kernel is that of the base layer, the variable itself; otherwise, and
      by default, it is a new one. `batch_ensemble`, which converts a model, keeps the weights.
    - `init`: of `r` and `s`: `"normal"`, with their means and deviations, or `"random_sign"`.
    """

    base = BaseLayer(nnx.Linear, _get_shapes)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The results of all members, `[E * B, ..., out_features]`."""
        check_stack(self, (self.in_features,))
        last = max(inputs.ndim - 1, 1)
        check_width(self, inputs, (last,), (self.in_features,))
        run = lambda layer, x: _linear(layer, x, out_sharding)  # noqa: E731
        return modulate(self, inputs, run, (last,), (-1,))


def _get_general_shapes(base: Any) -> LayerShapes:
    if base.batch_axis:
        raise ValueError(
            "`base_layer` of BatchEnsembleLinearGeneral must have no batch_axis, but has "
            f"{dict(base.batch_axis)}: its rows have weights of their own, so members cannot "
            "share them."
        )
    ins, outs = base.in_features, base.out_features
    # Flax draws it as if all input axes were one, and all output axes.
    flat = math.prod(ins), math.prod(outs)
    return LayerShapes((*ins, *outs), ins, outs, outs, flat)


class BatchEnsembleLinearGeneral(EnsembleLayer, nnx.LinearGeneral):
    """A linear layer over several axes, as `nnx.MultiHeadAttention` has them, of several members.

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> base = nnx.LinearGeneral(6, (2, 3), rngs=nnx.Rngs(0))
    >>> layer = BatchEnsembleLinearGeneral(base, rngs=1, num_members=4)
    >>> layer(jnp.ones((4 * 5, 7, 6))).shape
    (20, 7, 2, 3)

    `r` has the shape `[num_members, *in_features]`, `s` and the bias `[num_members,
    *out_features]`. Everything else is as for `BatchEnsembleLinear`.
    """

    base = BaseLayer(nnx.LinearGeneral, _get_general_shapes)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The results of all members, `[E * B, ..., *out_features]`."""
        check_stack(self, self.in_features)
        axes = [a + inputs.ndim if a < 0 else a for a in self.axis]
        check_width(self, inputs, axes, self.in_features)
        if 0 in axes:
            raise ValueError(
                f"`inputs` of BatchEnsembleLinearGeneral has the shape {list(inputs.shape)}, but "
                f"the layer is applied along the axes {list(self.axis)}, and the first axis must "
                "be that of the members' rows."
            )
        outs = range(-len(self.out_features), 0)
        run = lambda layer, x: _linear_general(layer, x, out_sharding)  # noqa: E731
        return modulate(self, inputs, run, axes, outs)
