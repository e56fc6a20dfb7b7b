"""Captures of every module of an NNX train step, over `nnx.capture` and `perturb` in the model.

The captured step is unmodified: `nnx.jit`, `nnx.value_and_grad`, an `nnx.Optimizer` updated in
place. Flax needs a copy of the model in which every module sows its result and perturbs it, a zero
for each result, made once, and a step that differentiates with respect to these zeros.

Memory is that of the whole program and its arguments, which contain the zeros of Flax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tapax
from benchmarks.flax_gpt import GPT, Kinds, cross_entropy
from benchmarks.gpt import Config
from benchmarks.measure import Result, build, in_all, race, require_equal
from benchmarks.step import tolerance

Named = dict[str, jax.Array]
FLAX = "nnx.capture, perturb"


def loss(model: GPT, tokens: jax.Array) -> jax.Array:
    return cross_entropy(model(tokens), tokens)


def plain_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss)(model, tokens)
    optimizer.update(model, grads)
    return value


def sow_and_perturb(module: Any, run: Callable[[], Any]) -> Any:
    out = run()
    module.sow(nnx.Intermediate, "out", out)
    return module.perturb("out", out)


def written_step(model: GPT, optimizer: nnx.Optimizer, zeros: nnx.State, tokens: jax.Array) -> Any:
    """Run the step as Flax documents it; return the value, the sown values, and the gradients."""

    def captured(model: GPT, zeros: nnx.State, tokens: jax.Array) -> Any:
        return nnx.capture(loss, nnx.Intermediate, init=zeros)(model, tokens)

    derive = nnx.value_and_grad(captured, argnums=(0, 1), has_aux=True)
    (value, sown), (grads, found) = derive(model, zeros, tokens)
    optimizer.update(model, grads)
    return value, sown, found


def named(state: nnx.State) -> Named:
    """Rename the values that Flax returns to the names of tapax."""
    found = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        name = "/".join(["GPT", *map(str, path[:-1])])
        found[name] = value[0] if isinstance(value, tuple) else value
    return found


class Sides:
    """A model in two forms, plain and with Flax's marks, and the arguments of a step of each."""

    def __init__(self, cfg: Config, rule: optax.GradientTransformation, *, scanned: bool) -> None:
        self.cfg = cfg
        rng = np.random.default_rng(0)
        tokens = rng.integers(cfg.vocab, size=(cfg.batch, cfg.length + 1))
        self.tokens = jnp.asarray(tokens, jnp.int32)
        kinds = Kinds(sow_and_perturb)
        self.plain = GPT(cfg, Kinds(), scanned=scanned)
        self.written = kinds(GPT)(cfg, kinds, scanned=scanned)
        self.plain_state = self.plain, nnx.Optimizer(self.plain, rule, wrt=nnx.Param)
        self.written_state = self.written, nnx.Optimizer(self.written, rule, wrt=nnx.Param)

        graph, state = nnx.split(self.written)
        shapes = jax.eval_shape(
            lambda state: nnx.capture(nnx.merge(graph, state), nnx.Perturbation)(self.tokens)[1],
            state,
        )
        self.zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        plain, written = nnx.jit(plain_step), nnx.jit(written_step)
        captured: Any = tapax.capture(plain)
        self.calls: dict[str, Callable[[], Any]] = {
            "captured": lambda: captured(*self.plain_state, self.tokens),
            "flax": lambda: written(*self.written_state, self.zeros, self.tokens),
            "plain": lambda: plain(*self.plain_state, self.tokens),
        }

    def check(self) -> None:
        """Run a step on both sides; raise unless they agree."""
        value, sown, found = self.calls["flax"]()
        out, taps = self.calls["captured"]()
        expected = value, named(sown), named(found)
        actual = out, dict(taps.values), dict(taps.grads)
        require_equal("captured", actual, expected, tolerance(self.cfg))
        params, expected = (jax.tree.leaves(nnx.state(m)) for m in (self.plain, self.written))
        require_equal("the model", params, expected, tolerance(self.cfg))

    def programs(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Return the steps as functions of arrays, with their arguments; the first is the state."""
        plain, plain_state = pure(plain_step, self.plain_state)
        written, state = pure(written_step, self.written_state)

        def gradients(state: Any, zeros: nnx.State, tokens: jax.Array) -> Any:
            (value, _, found), state = written(state, zeros, tokens)
            return (value, found), state

        def zeros_inside(state: Any, tokens: jax.Array) -> Any:
            return written(state, jax.tree.map(jnp.zeros_like, self.zeros), tokens)

        def norms(state: Any, zeros: nnx.State, tokens: jax.Array) -> Any:
            (value, found), state = gradients(state, zeros, tokens)
            return (value, jax.tree.map(jnp.linalg.norm, found)), state

        rms = {"**": tapax.reduce.rms}
        bare, marked = (plain_state, self.tokens), (state, self.zeros, self.tokens)
        return {
            "plain": (plain, bare),
            "captured rms": (tapax.capture(plain, values=rms, grads=rms), bare),
            "flax norms": (norms, marked),
            "captured": (tapax.capture(plain), bare),
            "flax": (written, marked),
            "flax, zeros inside": (zeros_inside, (state, self.tokens)),
            "captured gradients": (tapax.capture(plain, values=()), bare),
            "flax gradients": (gradients, marked),
        }


def pure(step: Callable[..., Any], nodes: tuple[Any, ...]) -> tuple[Callable[..., Any], Any]:
    graph, state = nnx.split(nodes)

    def run(state: Any, *args: Any) -> Any:
        nodes = nnx.merge(graph, state)
        out = step(*nodes, *args)
        return out, nnx.state(nodes)

    return run, state


def unrolled(cfg: Config, rounds: int) -> list[Result]:
    sides = Sides(cfg, optax.adam(1e-3), scanned=False)
    sides.check()
    times = race(sides.calls, rounds)
    programs = sides.programs()
    built = {k: (build(f, *args), args) for k, (f, args) in programs.items() if k in times}
    alone = race({k: lambda f=f, args=args: f(*args) for k, (f, args) in built.items()}, rounds)
    mib = {name: in_all(f) for name, (f, _) in built.items()}
    topic = f"NNX, {cfg.layers} blocks"
    return [
        Result.timed(topic, f"time over {FLAX}", times, "captured", "flax", bar=1.0),
        Result(topic, f"memory over {FLAX}", mib["captured"], mib["flax"], "MiB", bar=1.0),
        Result.timed(topic, f"compiled alone, over {FLAX}", alone, "captured", "flax"),
        Result.timed(topic, "time over plain", times, "captured", "plain"),
    ]


def calling(cfg: Config, rounds: int) -> list[Result]:
    """Measure the time to call the step of a model that is so small that little is computed."""
    sides = Sides(cfg, optax.adam(1e-3), scanned=False)
    sides.check()
    entrants = {name: sides.calls[name] for name in ("captured", "plain")}
    times = race(entrants, rounds)
    topic = f"NNX, {cfg.layers} blocks of width {cfg.width}, Adam"
    return [Result.timed(topic, "calling, over nnx.jit", times, "captured", "plain", bar=1.1)]


def remat(cfg: Config, rounds: int) -> list[Result]:
    """Compare memory, without running the programs.

    Both sides return what they capture. If there are many more tokens than the width of the model,
    these results are most of the memory. Then the zeros of Flax multiply the memory by 3/2 for
    values and gradients, and by 2 for gradients alone: no ratio can be below 2/3, or below 1/2.
    """
    del rounds
    sides = Sides(cfg, optax.sgd(1e-2), scanned=True)
    sides.check()
    built = {k: build(f, *args, donate=(0,)) for k, (f, args) in sides.programs().items()}
    mib = {name: in_all(f) for name, f in built.items()}
    topic = f"NNX, {cfg.layers} blocks, scan, remat"

    def over(what: str, top: str, base: str, bar: float | None = None) -> Result:
        return Result(topic, what, mib[top], mib[base], "MiB", bar=bar)

    return [
        over("rms of values and gradients: memory over plain", "captured rms", "plain", bar=1.02),
        over("perturb, norms of gradients: memory over plain", "flax norms", "plain"),
        over(f"memory over {FLAX}", "captured", "flax", bar=0.7),
        over("gradients: memory over perturb", "captured gradients", "flax gradients", bar=0.7),
        over(f"memory over {FLAX}, zeros made inside", "captured", "flax, zeros inside"),
    ]
