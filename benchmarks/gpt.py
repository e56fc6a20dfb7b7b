"""A GPT in plain JAX, and its train step: bare, marked, and written by hand to return its sites.

Each block has three sites: `attn` and `mlp` (their contributions to the stream), and `out` (the
stream after the block). The model takes its marks as an argument: `tapax` itself, or `Bare`, which
makes the program that a user writes without tapax.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = dict[str, Any]
Sites = dict[str, jax.Array]
Step = Callable[[Params, jax.Array], Any]
PARTS = ("attn", "mlp", "out")


@dataclass(frozen=True)
class Config:
    layers: int = 12
    width: int = 128
    heads: int = 4
    length: int = 128
    batch: int = 2
    vocab: int = 256
    dtype: Any = jnp.float32

    def arguments(self, *, stacked: bool = False) -> tuple[Params, jax.Array]:
        """Make parameters and a batch of tokens; the blocks are a list, or `stacked` for a scan."""
        rng = np.random.default_rng(0)

        def matrix(rows: int, cols: int) -> jax.Array:
            return jnp.asarray(rng.normal(0, rows**-0.5, (rows, cols)), self.dtype)

        def block() -> Params:
            shapes = {"qkv": (1, 3), "proj": (1, 1), "up": (1, 4), "down": (4, 1)}
            return {k: matrix(a * self.width, b * self.width) for k, (a, b) in shapes.items()}

        blocks: Any = [block() for _ in range(self.layers)]
        if stacked:
            blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        params = {
            "embed": matrix(self.vocab, self.width),
            "place": matrix(self.length, self.width),
            "blocks": blocks,
            "head": matrix(self.width, self.vocab),
        }
        tokens = rng.integers(self.vocab, size=(self.batch, self.length + 1))
        return params, jnp.asarray(tokens, jnp.int32)


class Marks(Protocol):
    """The functions with which the model marks its values; the module `tapax` has them."""

    def sow(self, value: jax.Array, name: str, /) -> jax.Array: ...
    def scope(self, name: str, /) -> AbstractContextManager[Any]: ...


class Bare:
    """Functions that mark nothing."""

    def sow(self, value: jax.Array, name: str, /) -> jax.Array:
        return value

    def scope(self, name: str, /) -> AbstractContextManager[None]:
        return nullcontext()


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(p: Params, x: jax.Array, heads: int) -> jax.Array:
    batch, length, width = x.shape
    qkv = (norm(x) @ p["qkv"]).reshape(batch, length, 3, heads, width // heads)
    q, k, v = jnp.moveaxis(qkv, (2, 3), (0, 2))
    scores = (q @ k.mT).astype(jnp.float32) * (width // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jax.nn.softmax(scores).astype(x.dtype) @ v
    return mixed.swapaxes(1, 2).reshape(x.shape) @ p["proj"]


def mlp(p: Params, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def block(p: Params, x: jax.Array, heads: int, marks: Marks) -> jax.Array:
    x = x + marks.sow(attention(p, x, heads), "attn")
    x = x + marks.sow(mlp(p, x), "mlp")
    return marks.sow(x, "out")


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    return params["embed"][tokens[:, :-1]] + params["place"]


def head(params: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """Compute the loss from the last value of the stream."""
    logp = jax.nn.log_softmax((norm(x) @ params["head"]).astype(jnp.float32))
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()


def unrolled(cfg: Config, marks: Marks) -> Callable[[Params, jax.Array], jax.Array]:
    """Make the loss with the blocks one after the other."""

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        x = embed(params, tokens)
        for i, p in enumerate(params["blocks"]):
            with marks.scope(f"block{i}"):
                x = block(p, x, cfg.heads, marks)
        return head(params, x, tokens)

    return loss


def scanned(cfg: Config, marks: Marks) -> Callable[[Params, jax.Array], jax.Array]:
    """Make the loss with the blocks in a scan that recomputes each in the backward pass."""

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        @jax.checkpoint
        def body(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
            return block(p, x, cfg.heads, marks), None

        return head(params, lax.scan(body, embed(params, tokens), params["blocks"])[0], tokens)

    return loss


def sgd(params: Params, grads: Params) -> Params:
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def train_step(loss: Callable[[Params, jax.Array], jax.Array]) -> Step:
    def step(params: Params, tokens: jax.Array) -> tuple[Params, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return sgd(params, grads), value

    return step
