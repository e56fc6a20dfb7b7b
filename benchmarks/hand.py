"""The train step of `gpt`, written by hand to return the values and gradients of its sites.

There are three common ways, which all return `((params, loss), values, grads)`. None is the best
everywhere, so benchmarks compare tapax with the fastest, or the smallest, on the current machine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import gpt
from benchmarks.gpt import Config, Params, Sites, Step

Hand = tuple[tuple[Params, jax.Array], Sites, Sites]
Port = Callable[[jax.Array, jax.Array], jax.Array]


@jax.custom_vjp
def port(x: jax.Array, slot: jax.Array) -> jax.Array:
    """Return `x`, and send its gradient to `slot` as well."""
    return x


port.defvjp(lambda x, slot: (x, None), lambda _, g: (g, g))


class Slots:
    """Marks that keep each value and pass it through `join` with a separate slot."""

    def __init__(self, slots: Sites, join: Port) -> None:
        self.slots, self.join, self.values, self.prefix = slots, join, Sites(), ""

    def sow(self, value: jax.Array, name: str, /) -> jax.Array:
        name = self.prefix + name
        self.values[name] = value
        return self.join(value, self.slots[name])

    def scope(self, name: str, /) -> AbstractContextManager[None]:
        @contextmanager
        def inside():
            self.prefix = f"{name}/"
            yield
            self.prefix = ""

        return inside()


def by_slots(cfg: Config, join: Port) -> Step:
    """Make a step that joins zeros to every site and differentiates with respect to them."""

    def step(params: Params, tokens: jax.Array) -> Hand:
        def loss(params: Params, slots: Sites) -> tuple[jax.Array, Sites]:
            marks = Slots(slots, join)
            return gpt.unrolled(cfg, marks)(params, tokens), marks.values

        zero = jnp.zeros((cfg.batch, cfg.length, cfg.width), cfg.dtype)
        slots = {f"block{i}/{part}": zero for i in range(cfg.layers) for part in gpt.PARTS}
        derive = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, values), (grads, site_grads) = derive(params, slots)
        return (gpt.sgd(params, grads), value), values, site_grads

    return step


def forward(p: Params, x: jax.Array, heads: int) -> tuple[tuple[Any, Any], jax.Array, Sites]:
    """Run a block in pieces between its sites; return the pullbacks, the output and the values."""
    attn, pull_attn = jax.vjp(partial(gpt.attention, heads=heads), p, x)
    mlp, pull_mlp = jax.vjp(gpt.mlp, p, x + attn)
    out = x + attn + mlp
    return (pull_attn, pull_mlp), out, {"attn": attn, "mlp": mlp, "out": out}


def backward(pulls: tuple[Any, Any], dout: jax.Array) -> tuple[Params, jax.Array, Sites]:
    """Compute the gradients of a block: of its parameters, its input and its sites."""
    pull_attn, pull_mlp = pulls
    dp_mlp, through = pull_mlp(dout)
    dmid = dout + through
    dp_attn, through = pull_attn(dmid)
    dp = jax.tree.map(jnp.add, dp_attn, dp_mlp)
    return dp, dmid + through, {"attn": dmid, "mlp": dout, "out": dout}


def by_vjp(cfg: Config) -> Step:
    """Make a step with both passes written block by block, which adds nothing to the program."""

    def step(params: Params, tokens: jax.Array) -> Hand:
        x, pull_embed = jax.vjp(lambda p: gpt.embed(p, tokens), params)
        pulls, values, site_grads, blocks = [], Sites(), Sites(), []
        for i, p in enumerate(params["blocks"]):
            pull, x, found = forward(p, x, cfg.heads)
            pulls.append(pull)
            values |= {f"block{i}/{part}": found[part] for part in found}
        value, pull_head = jax.vjp(lambda p, x: gpt.head(p, x, tokens), params, x)
        grads, dx = pull_head(jnp.ones_like(value))
        for i, pull in reversed(list(enumerate(pulls))):
            dp, dx, found = backward(pull, dx)
            blocks.insert(0, dp)
            site_grads |= {f"block{i}/{part}": found[part] for part in found}
        grads = jax.tree.map(jnp.add, grads, pull_embed(dx)[0]) | {"blocks": blocks}
        return (gpt.sgd(params, grads), value), values, site_grads

    return step


def by_vjp_scanned(cfg: Config) -> Step:
    """Make a step like `by_vjp` with a scan over blocks; a reverse scan recomputes the blocks."""

    def step(params: Params, tokens: jax.Array) -> Hand:
        def ahead(x: jax.Array, p: Params) -> tuple[jax.Array, tuple[jax.Array, Sites]]:
            _, out, found = forward(p, x, cfg.heads)
            return out, (x, found)

        def back(dx: jax.Array, layer: tuple[Params, jax.Array]) -> Any:
            # The barrier keeps the compiler from undoing the recomputation.
            p, x = lax.optimization_barrier(layer)
            pulls, _, _ = forward(p, x, cfg.heads)
            dp, dx, found = backward(pulls, dx)
            return dx, (dp, found)

        x, pull_embed = jax.vjp(lambda p: gpt.embed(p, tokens), params)
        x, (inputs, values) = lax.scan(ahead, x, params["blocks"])
        value, pull_head = jax.vjp(lambda p, x: gpt.head(p, x, tokens), params, x)
        grads, dx = pull_head(jnp.ones_like(value))
        dx, (blocks, site_grads) = lax.scan(back, dx, (params["blocks"], inputs), reverse=True)
        grads = jax.tree.map(jnp.add, grads, pull_embed(dx)[0]) | {"blocks": blocks}
        return (gpt.sgd(params, grads), value), values, site_grads

    return step


def unrolled(cfg: Config) -> dict[str, Step]:
    return {
        "added zeros": by_slots(cfg, jnp.add),
        "custom_vjp": by_slots(cfg, port),
        "vjp by block": by_vjp(cfg),
    }
