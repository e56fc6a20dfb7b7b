"""BatchEnsemble of `nnx.Embed`: a linear layer on one-hot tokens, without the one-hot."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tapax.nn._factors import BaseLayer, EnsembleLayer, LayerShapes
from tapax.nn._member_rows import check_stack, check_width, count_rows, spread_rows

# A capture puts its own function in the place of this one while it traces.
_embed = inspect.unwrap(nnx.Embed.__call__)
_attend = inspect.unwrap(nnx.Embed.attend)
_variance = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


def _weigh(y: jax.Array, r: jax.Array, tokens: jax.Array) -> jax.Array:
    """Embeddings times the number that a member has for each token."""
    each = jax.vmap(jnp.take)(r, tokens.reshape(len(r), -1))
    return y * each.reshape(*tokens.shape, 1)


def _get_shapes(base: Any) -> LayerShapes:
    return LayerShapes(
        (base.num_embeddings, base.features), (base.num_embeddings,), (base.features,)
    )


class BatchEnsembleEmbed(EnsembleLayer, nnx.Embed):
    """A table of embeddings of several members.

    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp
    >>> layer = BatchEnsembleEmbed(nnx.Embed(10, 3, rngs=nnx.Rngs(0)), rngs=1, num_members=4)
    >>> layer.r.shape, layer.s.shape
    ((4, 10), (4, 3))
    >>> layer(jnp.zeros((4 * 5, 7), int)).shape
    (20, 7, 3)

    Member `k` has the table `embedding * outer(r_k, s_k)`: `s_k` is on the features and `r_k` has
    one number for each token. That is what `BatchEnsembleLinear` is for one-hot inputs, so a
    member can weigh words differently; it costs `num_members / features` of the table. `attend`
    uses the same tables, so weights that are tied stay tied for every member. Arguments are as for
    `BatchEnsembleLinear`.

    Tokens of one axis are refused. They are most often positions, `embed(jnp.arange(length))`, and
    members have no rows in these: see `where` of `batch_ensemble`.
    """

    base = BaseLayer(nnx.Embed, _get_shapes, _variance, "embedding")

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The embeddings of integer tokens `[E * B, T, ...]`, `[E * B, T, ..., features]`."""
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
                "one token for each row or positions that all rows share: give tokens an axis of "
                "their own, [rows, 1], and leave an embedding of positions out of the ensemble."
            )
        batch = count_rows(self, inputs)
        y = _embed(self, inputs, out_sharding)
        # As in the base layer: with one embedding tokens do not matter, and a gather has no
        # sharding in explicit mode.
        tokens = jnp.zeros_like(inputs) if self.num_embeddings == 1 else inputs
        weigh = _weigh
        if out_sharding is not None:
            weigh = jax.sharding.auto_axes(out_sharding=out_sharding)(_weigh)
        y = weigh(y, self.r[...].astype(y.dtype), tokens)
        return y * spread_rows(self.s[...].astype(y.dtype), batch, y.ndim, (0, y.ndim - 1))

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The inner products of queries `[E * B, ..., features]` with every embedding."""
        check_stack(self, (self.num_embeddings,))
        last = max(query.ndim - 1, 1)
        check_width(self, query, (last,), (self.features,), argument="query")
        batch = count_rows(self, query, "query")
        x, _ = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        x = x * spread_rows(self.s[...].astype(x.dtype), batch, x.ndim, (0, last))
        y = _attend(self, x, out_sharding)
        return y * spread_rows(self.r[...].astype(y.dtype), batch, y.ndim, (0, last))
