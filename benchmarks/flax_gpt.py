"""The GPT of `gpt` in Flax NNX and in Flax Linen, without any use of tapax.

Every layer is a module, nine in a block, and none records anything. `Kinds` derives a class that
records from each NNX class, with marks in its `__call__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from benchmarks.gpt import Config

Keep = Callable[[Any, Callable[[], Any]], Any]
"""A function `(module, run) -> result` that runs the `__call__` of a module and records."""


def mix(qkv: jax.Array, heads: int) -> jax.Array:
    """Compute causal attention of queries, keys and values that are concatenated in `qkv`."""
    batch, length, width = qkv.shape
    parts = qkv.reshape(batch, length, 3, heads, width // 3 // heads)
    q, k, v = jnp.moveaxis(parts, (2, 3), (0, 2))
    scores = (q @ k.mT).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jax.nn.softmax(scores).astype(v.dtype) @ v
    return mixed.swapaxes(1, 2).reshape(batch, length, width // 3)


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()


class Kinds:
    """The classes of the modules of a model: plain, or derived to record their results."""

    def __init__(self, keep: Keep | None = None) -> None:
        self._keep = keep
        self._made: dict[type, type] = {}

    def __call__(self, cls: type) -> Any:
        if self._keep is None:
            return cls
        if cls not in self._made:
            self._made[cls] = recording(cls, self._keep)
        return self._made[cls]


def recording(cls: type, keep: Keep) -> type:
    """Derive a class whose `__call__` runs within `keep`."""

    def __call__(self: Any, *args: Any) -> Any:
        return keep(self, lambda: cls.__call__(self, *args))

    return type(cls.__name__, (cls,), {"__call__": __call__})


class Attention(nnx.Module):
    def __init__(self, cfg: Config, kinds: Kinds, rngs: nnx.Rngs) -> None:
        plain = {"dtype": cfg.dtype, "param_dtype": cfg.dtype, "rngs": rngs}
        self.norm = kinds(nnx.RMSNorm)(cfg.width, **plain)
        self.qkv = kinds(nnx.Linear)(cfg.width, 3 * cfg.width, use_bias=False, **plain)
        self.proj = kinds(nnx.Linear)(cfg.width, cfg.width, use_bias=False, **plain)
        self.heads = cfg.heads

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.proj(mix(self.qkv(self.norm(x)), self.heads))


class MLP(nnx.Module):
    def __init__(self, cfg: Config, kinds: Kinds, rngs: nnx.Rngs) -> None:
        plain = {"dtype": cfg.dtype, "param_dtype": cfg.dtype, "rngs": rngs}
        self.norm = kinds(nnx.RMSNorm)(cfg.width, **plain)
        self.up = kinds(nnx.Linear)(cfg.width, 4 * cfg.width, use_bias=False, **plain)
        self.down = kinds(nnx.Linear)(4 * cfg.width, cfg.width, use_bias=False, **plain)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(self.norm(x))))


class Block(nnx.Module):
    def __init__(self, cfg: Config, kinds: Kinds, rngs: nnx.Rngs) -> None:
        self.attn = kinds(Attention)(cfg, kinds, rngs)
        self.mlp = kinds(MLP)(cfg, kinds, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(x)
        return x + self.mlp(x)


class GPT(nnx.Module):
    """A GPT with its blocks in a list, or stacked in a scan with recomputation of each block."""

    def __init__(self, cfg: Config, kinds: Kinds, *, scanned: bool = False) -> None:
        rngs = nnx.Rngs(0)
        plain = {"dtype": cfg.dtype, "param_dtype": cfg.dtype, "rngs": rngs}
        self.embed = kinds(nnx.Embed)(cfg.vocab, cfg.width, **plain)
        self.place = kinds(nnx.Embed)(cfg.length, cfg.width, **plain)
        if scanned:
            make = nnx.vmap(lambda rngs: kinds(Block)(cfg, kinds, rngs))
            self.blocks = make(rngs.split(cfg.layers))
        else:
            self.blocks = nnx.List([kinds(Block)(cfg, kinds, rngs) for _ in range(cfg.layers)])
        self.norm = kinds(nnx.RMSNorm)(cfg.width, **plain)
        self.head = kinds(nnx.Linear)(cfg.width, cfg.vocab, use_bias=False, **plain)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens[:, :-1]) + self.place(jnp.arange(tokens.shape[1] - 1))
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x = block(x)
        else:
            x = nnx.scan(nnx.remat(run_block), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
                self.blocks, x
            )
        return self.head(self.norm(x))


def run_block(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


class LinenAttention(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        plain = {"dtype": self.cfg.dtype, "param_dtype": self.cfg.dtype}
        x = nn.RMSNorm(name="norm", **plain)(x)
        qkv = nn.Dense(3 * self.cfg.width, use_bias=False, name="qkv", **plain)(x)
        proj = nn.Dense(self.cfg.width, use_bias=False, name="proj", **plain)
        return proj(mix(qkv, self.cfg.heads))


class LinenMLP(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        plain = {"dtype": self.cfg.dtype, "param_dtype": self.cfg.dtype}
        x = nn.RMSNorm(name="norm", **plain)(x)
        x = nn.Dense(4 * self.cfg.width, use_bias=False, name="up", **plain)(x)
        return nn.Dense(self.cfg.width, use_bias=False, name="down", **plain)(jax.nn.gelu(x))


class LinenBlock(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + LinenAttention(self.cfg, name="attn")(x)
        return x + LinenMLP(self.cfg, name="mlp")(x)


class LinenGPT(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        cfg = self.cfg
        plain = {"dtype": cfg.dtype, "param_dtype": cfg.dtype}
        x = nn.Embed(cfg.vocab, cfg.width, name="embed", **plain)(tokens[:, :-1])
        x = x + nn.Embed(cfg.length, cfg.width, name="place", **plain)(jnp.arange(cfg.length))
        for i in range(cfg.layers):
            x = LinenBlock(cfg, name=f"block{i}")(x)
        x = nn.RMSNorm(name="norm", **plain)(x)
        return nn.Dense(cfg.vocab, use_bias=False, name="head", **plain)(x)
