"""BatchEnsemble of `nnx.Embed`: a linear layer on one-hot tokens, without the one-hot."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tapax.nn._factors import BaseLayer, EnsembleLayer, LayerShapes
from tapax.nn._member_rows import check_stack, check_width, count_rows, spread_rows

# A capture replaces these methods while it traces.
_embed = inspect.unwrap(nnx.Embed.__call__)
_attend = inspect.unwrap(nnx.Embed.attend)
_variance = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


def _weigh(y: jax.Array, r: jax.Array, tokens: jax.Array) -> jax.Array:
    """Multiply embeddings by the number that a member has for each token."""
    each = jax.vmap(jnp.take)(r, tokens.reshape(len(r), -1))
    return y * each.reshape(*tokens.shape, 1)


def _get_shapes(base: Any) -> LayerShapes:
    return LayerShapes(
        (base.num_embeddings, base.features), (base.num_embeddings,), (base.features,)
    )


class BatchEnsembleEmbed(EnsembleLayer, nnx.Embed):
    """A table of embeddings of several members.

    Member `k` has the table `embedding * outer(r_k, s_k)`: `s_k` scales the features, and `r_k` has
    one number for each token. The layer equals `BatchEnsembleLinear` on one-hot inputs, so each
    member can weigh words differently; all members together add `num_members / features` times the
    size of the table. `attend` uses the same tables, so that tied weights are tied for every
    member.

    The layer refuses tokens with one axis. They are most often positions,
    `embed(jnp.arange(length))`, which contain no rows of members: see `where` of `batch_ensemble`.

    Args:
        base_layer: The `nnx.Embed` to convert. It stays as it is.
        rngs: An `nnx.Rngs`, from whose stream `params` the layer draws; an `nnx.RngStream`; or a
            seed or a key, which is combined with the weights of the base layer, so that layers made
            with one seed have different factors.
        num_members: The number of members.
        use_base_weights: Whether to use the table of the base layer, the variable itself. By
            default the layer draws a new table; `batch_ensemble` keeps the weights by default.
        init: The distribution of `r` and `s`: `"normal"` or `"random_sign"`.
        r_mean: The mean of `r`, for `"normal"`.
        r_std: The standard deviation of `r`, for `"normal"`.
        s_mean: The mean of `s`, for `"normal"`.
        s_std: The standard deviation of `s`, for `"normal"`.

    Raises:
        TypeError: If `base_layer` is not a plain `nnx.Embed`, or `rngs` not a source of keys.
        ValueError: If an option is out of range, or if stacked weights are not stacked along the
            first axes.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from tapax import nn
        >>> base = nnx.Embed(10, 3, rngs=nnx.Rngs(0))
        >>> layer = nn.BatchEnsembleEmbed(base, rngs=1, num_members=4)
        >>> layer.r.shape, layer.s.shape
        ((4, 10), (4, 3))
        >>> layer(jnp.arange(4 * 5 * 7).reshape(20, 7) % 10).shape
        (20, 7, 3)
    """

    base = BaseLayer(nnx.Embed, _get_shapes, _variance, "embedding")

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Look up integer tokens `[E * B, T, ...]`; return `[E * B, T, ..., features]`."""
        check_stack(self, (self.num_embeddings,))
        inputs = jnp.asarray(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise TypeError(
                f"`inputs` of BatchEnsembleEmbed must be integer tokens, but has the dtype "
                f"{inputs.dtype}."
            )
        if inputs.ndim == 1:
            raise ValueError(
                f"`inputs` of BatchEnsembleEmbed has the shape {list(inputs.shape)}, which may be "
                "one token for each row or positions that all rows share. Give tokens a second "
                "axis, [rows, 1], and leave an embedding of positions out of the ensemble."
            )
        batch = count_rows(self, inputs)
        y = _embed(self, inputs, out_sharding)
        # As in the base layer: with one embedding the tokens do not matter, and a gather has no
        # sharding in explicit mode.
        tokens = jnp.zeros_like(inputs) if self.num_embeddings == 1 else inputs
        weigh = _weigh
        if out_sharding is not None:
            weigh = jax.sharding.auto_axes(out_sharding=out_sharding)(_weigh)
        y = weigh(y, self.r[...].astype(y.dtype), tokens)
        return y * spread_rows(self.s[...].astype(y.dtype), batch, y.ndim, (0, y.ndim - 1))

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Compute the inner products of queries with every embedding, for each member.

        Args:
            query: An array `[E * B, ..., features]`.
            out_sharding: The sharding of the result, as in `nnx.Embed.attend`.

        Returns:
            An array `[E * B, ..., num_embeddings]`.

        Raises:
            ValueError: If the rows are not a multiple of the members, or the features do not fit.

        Example:
            >>> import jax
            >>> from flax import nnx
            >>> from tapax import nn
            >>> base = nnx.Embed(10, 3, rngs=nnx.Rngs(0))
            >>> layer = nn.BatchEnsembleEmbed(base, rngs=1, num_members=4)
            >>> layer.attend(jax.random.normal(jax.random.key(0), (4 * 5, 7, 3))).shape
            (20, 7, 10)
        """
        check_stack(self, (self.num_embeddings,))
        last = max(query.ndim - 1, 1)
        check_width(self, query, (last,), (self.features,), argument="query")
        batch = count_rows(self, query, "query")
        x, _ = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        x = x * spread_rows(self.s[...].astype(x.dtype), batch, x.ndim, (0, last))
        y = _attend(self, x, out_sharding)
        return y * spread_rows(self.r[...].astype(y.dtype), batch, y.ndim, (0, last))
