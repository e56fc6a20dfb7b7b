"""Random keys from the argument `rngs`: a source of Flax, a seed, or a key."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def make_keys(rngs: Any, model: nnx.Module) -> nnx.RngStream:
    """Make a stream of keys for a layer, or for all layers of a model.

    A seed or a key is combined with the weights of the model. So several layers made with one seed
    have different factors, each layer has the same factors whenever it is made, and new weights
    differ from those of a model made with the same seed.
    """
    if isinstance(rngs, nnx.RngStream):
        return rngs
    if not isinstance(rngs, nnx.Rngs):
        weights = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
        numeric = [w for w in weights if jnp.issubdtype(w.dtype, jnp.number)]
        rngs = nnx.Rngs(jax.random.fold_in(_make_key(rngs), _compute_fingerprint(numeric)))
    return rngs.params


def _make_key(rngs: Any) -> jax.Array:
    if isinstance(rngs, numbers.Integral) and not isinstance(rngs, bool):
        return jax.random.key(int(rngs))
    if isinstance(rngs, (jax.Array, np.ndarray)):
        if jnp.issubdtype(rngs.dtype, jax.dtypes.prng_key) and rngs.shape == ():
            return jnp.asarray(rngs)
        if jnp.issubdtype(rngs.dtype, jnp.integer) and rngs.shape == ():
            return jax.random.key(rngs)
        if rngs.dtype == jnp.uint32 and rngs.ndim == 1:
            return jax.random.wrap_key_data(jnp.asarray(rngs))
    raise TypeError(
        "`rngs` must be an nnx.Rngs, an nnx.RngStream, an integer or one random key, but is "
        f"{rngs!r} of type {type(rngs).__name__}."
    )


@jax.jit
def _compute_fingerprint(weights: list[Any]) -> jax.Array:
    """Compute a number from every bit of some arrays and its position."""
    total = jnp.uint32(0)
    for leaf in weights:
        x = jnp.stack([leaf.real, leaf.imag]) if jnp.iscomplexobj(leaf) else jnp.asarray(leaf)
        unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).ravel()
        # A product with an odd factor loses no bit.
        place = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1
        mixed = (bits ^ (bits >> 15)) * jnp.uint32(0x2C1B3C6D) * place
        total = (total * jnp.uint32(31)) ^ jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
    return total
