"""Captures of every module of a Linen step, over `capture_intermediates` and `perturb`.

Neither side edits the model. With Flax, `capture_intermediates` collects the values; the gradients
need a zero for every module, which an interceptor adds to the result of the module.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import tapax
from benchmarks.flax_gpt import LinenGPT, cross_entropy
from benchmarks.gpt import Config
from benchmarks.measure import Result, build, in_all, race, require_equal
from benchmarks.step import tolerance

Tree = Any
FLAX = "capture_intermediates, perturb"


def perturbing(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
    out = run(*args, **kwargs)
    return context.module.perturb("out", out) if context.method_name == "__call__" else out


class Steps:
    """The plain step of a model, and the step with which Flax records its modules."""

    def __init__(self, cfg: Config, rule: optax.GradientTransformation) -> None:
        self.model, self.rule = LinenGPT(cfg), rule
        _, self.tokens = cfg.arguments()
        self.params = self.model.init(jax.random.key(0), self.tokens)["params"]
        self.state = rule.init(self.params)
        with nn.intercept_methods(perturbing):
            variables = jax.eval_shape(self.model.init, jax.random.key(0), self.tokens)
        shapes = variables["perturbations"]
        self.zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def update(self, params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        updates, state = self.rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def plain(self, params: Tree, state: Tree, tokens: jax.Array) -> Any:
        def loss(params: Tree) -> jax.Array:
            logits: Any = self.model.apply({"params": params}, tokens)
            return cross_entropy(logits, tokens)

        value, grads = jax.value_and_grad(loss)(params)
        return *self.update(params, state, grads), value

    def written(self, params: Tree, state: Tree, zeros: Tree, tokens: jax.Array) -> Any:
        def loss(params: Tree, zeros: Tree) -> Any:
            variables = {"params": params, "perturbations": zeros}
            with nn.intercept_methods(perturbing):
                logits, kept = self.model.apply(
                    variables, tokens, capture_intermediates=True, mutable=["intermediates"]
                )
            return cross_entropy(logits, tokens), kept["intermediates"]

        derive = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, kept), (grads, found) = derive(params, zeros)
        return (*self.update(params, state, grads), value), kept, found


def named(tree: Tree) -> dict[str, jax.Array]:
    """Rename the values that Flax returns to the names of tapax."""
    found = {}
    for keys, x in jax.tree.leaves_with_path(tree):
        # The last key is the name of the method or the perturbation; an index may follow it.
        path = [key.key for key in keys if isinstance(key, jax.tree_util.DictKey)][:-1]
        found["/".join(["LinenGPT", *path])] = x
    return found


def unrolled(cfg: Config, rounds: int) -> list[Result]:
    steps = Steps(cfg, optax.adam(1e-3))
    bare = steps.params, steps.state, steps.tokens
    marked = steps.params, steps.state, steps.zeros, steps.tokens
    plain, written = jax.jit(steps.plain), jax.jit(steps.written)
    captured = tapax.capture(plain)
    out, taps = captured(*bare)
    expected, kept, found = written(*marked)
    actual = out, dict(taps.values), dict(taps.grads)
    require_equal("captured", actual, (expected, named(kept), named(found)), tolerance(cfg))
    entrants = {
        "captured": lambda: captured(*bare),
        "flax": lambda: written(*marked),
        "plain": lambda: plain(*bare),
    }
    times = race(entrants, rounds)
    mib = in_all(build(captured, *bare)), in_all(build(written, *marked))
    topic = f"Linen, {cfg.layers} blocks"
    return [
        Result.timed(topic, f"time over {FLAX}", times, "captured", "flax", bar=1.0),
        Result(topic, f"memory over {FLAX}", *mib, "MiB", bar=1.0),
        Result.timed(topic, "time over plain", times, "captured", "plain"),
    ]
