"""A GPT-2 in plain JAX with marked sites, equal to PyTorch's GPT-2 for equal weights.

    cfg = Config(width=64, heads=4)
    params = init(0, cfg)
    logits = forward(params, tokens, cfg)  # [batch, length] -> [batch, length, vocab]
    save("weights.npz", params, cfg)  # for a peer to read

Each block has three sites: `blocks/3/attn` and `blocks/3/mlp`, their contributions to the stream,
and `blocks/3/resid`, the stream after the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tapax

Params = dict[str, Any]
EPSILON = 1e-5


@dataclass(frozen=True)
class Config:
    layers: int = 12
    width: int = 768
    heads: int = 12
    places: int = 1024
    vocab: int = 50257


def init(seed: int, cfg: Config) -> Params:
    """Make random weights with which every block, bias and position matters; logits are about 2."""
    rng = np.random.default_rng(seed)

    def normal(scale: float, *shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(scale))

    def norm() -> Params:
        return {"scale": 1 + normal(0.1, cfg.width), "shift": normal(0.1, cfg.width)}

    def linear(rows: int, cols: int, gain: float = 1.0) -> Params:
        return {"w": normal(gain * rows**-0.5, rows, cols), "b": normal(0.1 * gain, cols)}

    def block() -> Params:
        narrow, wide, gain = cfg.width, 4 * cfg.width, (2 * cfg.layers) ** -0.5
        return {
            "norm1": norm(),
            "qkv": linear(narrow, 3 * narrow),
            "proj": linear(narrow, narrow, gain),
            "norm2": norm(),
            "up": linear(narrow, wide),
            "down": linear(wide, narrow, gain),
        }

    return {
        "embed": normal(2 * cfg.width**-0.5, cfg.vocab, cfg.width),
        "place": normal(cfg.width**-0.5, cfg.places, cfg.width),
        "blocks": [block() for _ in range(cfg.layers)],
        "norm": norm(),
    }


def save(path: Path | str, params: Params, cfg: Config) -> None:
    """Write the parameters under their paths, `blocks/0/qkv/w`, and the number of heads."""
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    np.savez(path, heads=np.asarray(cfg.heads), **named)


def norm(p: Params, x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(centred * centred, -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + EPSILON) * p["scale"] + p["shift"]


def linear(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def attention(p: Params, x: jax.Array, heads: int) -> jax.Array:
    batch, length, width = x.shape
    qkv = linear(p["qkv"], norm(p["norm1"], x)).reshape(batch, length, 3, heads, width // heads)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return linear(p["proj"], mixed.reshape(x.shape))


def mlp(p: Params, x: jax.Array) -> jax.Array:
    return linear(p["down"], jax.nn.gelu(linear(p["up"], norm(p["norm2"], x)), approximate=True))


def block(p: Params, x: jax.Array, heads: int) -> jax.Array:
    x = x + tapax.sow(attention(p, x, heads), "attn")
    x = x + tapax.sow(mlp(p, x), "mlp")
    return tapax.sow(x, "resid")


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    return params["embed"][tokens] + params["place"][: tokens.shape[-1]]


def unembed(params: Params, x: jax.Array) -> jax.Array:
    return norm(params["norm"], x) @ params["embed"].T


def stream(params: Params, tokens: jax.Array, cfg: Config) -> jax.Array:
    """Compute the stream after the last block."""
    x = embed(params, tokens)
    for i, p in enumerate(params["blocks"]):
        with tapax.scope(f"blocks/{i}"):
            x = block(p, x, cfg.heads)
    return x


def forward(params: Params, tokens: jax.Array, cfg: Config) -> jax.Array:
    return unembed(params, stream(params, tokens, cfg))
