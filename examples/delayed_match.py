"""Train a recurrent model online on a delayed match, without keeping the steps of a sequence.

The model sees a cue, A or B, then noise, and then a probe. It has to say whether the probe equals
the cue. A GRU in Flax learns this by diagonal real-time recurrent learning, `online.d_rtrl`: every
step gives its gradient at once, so the memory does not grow with the sequence. For comparison, the
same model also learns by backpropagation through time, which keeps every step until the last one.

    python examples/delayed_match.py [picture.png]
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from tapax.hidden import online

UNITS, BATCH, LENGTH, BATCHES, EVERY = 48, 64, 20, 600, 20


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.cell = nnx.GRUCell(3, UNITS, rngs=rngs)
        self.head = nnx.Linear(UNITS, 1, rngs=rngs)

    def __call__(self, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h, y = self.cell(h, x)
        return h, self.head(y)[..., 0]


def trials(key: jax.Array, length: int = LENGTH) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Make inputs `[time, example, channel]`, a mask of the steps to answer, and the answers."""
    keys = jax.random.split(key, 4)
    cue, probe = jax.random.randint(keys[0], (2, BATCH), 0, 2)
    when = jax.random.randint(keys[1], (BATCH,), length // 2, length)
    steps = jnp.arange(length)[:, None]
    shown = jax.nn.one_hot(cue, 2) * (steps < 2)[..., None]
    asked = (steps == when).astype(jnp.float32)
    shown = shown + jax.nn.one_hot(probe, 2) * asked[..., None]
    noise = 0.1 * jax.random.normal(keys[2], shown.shape)
    match = jnp.broadcast_to(cue == probe, (length, BATCH)).astype(jnp.float32)
    return jnp.concatenate([shown + noise, asked[..., None]], -1), asked, match


def loss(out: jax.Array, target: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Compute the loss of one step, over the examples that must answer at this step."""
    asked, match = target
    return (asked * optax.sigmoid_binary_cross_entropy(out, match)).sum() / BATCH


def is_right(out: jax.Array, asked: jax.Array, match: jax.Array) -> jax.Array:
    return (asked * ((out > 0) == match)).sum() / BATCH


Gradient = Callable[[Any, Any], tuple[Any, jax.Array]]


def make() -> tuple[Any, Any]:
    """Make the parameters of a model, and its step as a function of them."""
    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def step(params: Any, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return nnx.merge(graph, params, rest)(h, x)

    return params, step


def online_gradient(step: Any) -> Gradient:
    """Make a function that computes the gradient of a sequence online, step by step."""
    learner = online.d_rtrl(step, loss)

    def gradient(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        def one(carry: Any, now: Any) -> Any:
            memory, grads, right = carry
            x, asked, match = now
            learned, memory = learner.update(memory, params, x, target=(asked, match))
            grads = jax.tree.map(jnp.add, grads, learned.grads)
            return (memory, grads, right + is_right(learned.out, asked, match)), None

        memory = learner.init(params, jnp.zeros((BATCH, UNITS)), batch[0][0])
        start = memory, jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
        (_, grads, right), _ = jax.lax.scan(one, start, batch)
        return grads, right

    return gradient


def backward_gradient(step: Any) -> Gradient:
    """Make a function that computes the gradient of a sequence by backpropagation through time."""

    def total(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        def one(h: jax.Array, now: Any) -> Any:
            x, asked, match = now
            h, out = step(params, h, x)
            return h, (loss(out, (asked, match)), is_right(out, asked, match))

        _, (losses, right) = jax.lax.scan(one, jnp.zeros((BATCH, UNITS)), batch)
        return losses.sum(), right.sum()

    return jax.grad(total, has_aux=True)


def train(name: str, gradient: Gradient, params: Any, progress: Progress) -> np.ndarray:
    """Train; return the share of right answers in each batch, before the update for that batch."""
    opt = optax.adam(3e-3)

    @jax.jit
    def some(carry: Any, keys: jax.Array) -> Any:
        def one(carry: Any, key: jax.Array) -> Any:
            params, state = carry
            grads, right = gradient(params, trials(key))
            updates, state = opt.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), right

        return jax.lax.scan(one, carry, keys)

    task = progress.add_task(name, total=BATCHES, right=np.nan)
    carry, seen = (params, opt.init(params)), []
    for key in jax.random.split(jax.random.key(1), BATCHES // EVERY):
        carry, right = some(carry, jax.random.split(key, EVERY))
        seen.append(np.asarray(right))
        progress.update(task, advance=EVERY, right=float(right.mean()))
    return np.concatenate(seen)


def memory_of(gradient: Gradient, params: Any, length: int) -> int:
    """Return the bytes of temporary memory that the compiled program needs."""
    batch = jax.eval_shape(lambda key: trials(key, length), jax.random.key(0))
    analysis = jax.jit(gradient).lower(params, batch).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def plot(
    curves: dict[str, np.ndarray], sizes: dict[str, list[float]], lengths: Any, path: str
) -> None:
    """Plot the accuracy over training, and the memory over the length of a sequence."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    colours = dict(zip(curves, ("#0072B2", "#D55E00"), strict=True))
    for name, curve in curves.items():
        smooth = curve.reshape(-1, EVERY).mean(1)
        axes[0].plot((np.arange(len(smooth)) + 1) * EVERY, 100 * smooth, color=colours[name])
        axes[1].plot(lengths, sizes[name], marker="o", ms=4, color=colours[name], label=name)
    axes[0].axhline(50, color="0.8", lw=1)
    axes[0].set(xlabel="batches", ylabel="right answers, %", title="Delayed match to sample")
    axes[1].set(
        xlabel="steps in a sequence", ylabel="MiB", xscale="log", yscale="log", title="Memory"
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=200)


def main(picture: str = "delayed_match.png") -> None:
    console = Console()
    params, step = make()
    ways = {"d_rtrl, online": online_gradient(step), "through time": backward_gradient(step)}
    columns = (
        "{task.description:<14}",
        BarColumn(),
        MofNCompleteColumn(),
        "{task.fields[right]:.0%} right",
        TimeElapsedColumn(),
    )
    start, curves, spent = time.perf_counter(), {}, {}
    with Progress(*columns, console=console) as progress:
        for name, gradient in ways.items():
            began = time.perf_counter()
            curves[name] = train(name, gradient, params, progress)
            spent[name] = time.perf_counter() - began
    lengths = (20, 200, 2000)
    sizes = {n: [memory_of(g, params, t) / 2**20 for t in lengths] for n, g in ways.items()}

    table = Table(title="Delayed match to sample", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in ("gradient", "right", "s", *(f"MiB, {t} steps" for t in lengths)):
        table.add_column(head, justify="left" if head == "gradient" else "right", no_wrap=True)
    for name, curve in curves.items():
        found = f"{curve[-200:].mean():.1%}", f"{spent[name]:.0f}"
        table.add_row(name, *found, *(f"{size:.2f}" for size in sizes[name]))
    console.print(table)
    plot(curves, sizes, lengths, picture)
    console.print(f"Accuracy and memory: {Path(picture).resolve()}", soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.0f} s in all")
    assert curves["d_rtrl, online"][-200:].mean() > 0.95


if __name__ == "__main__":
    main(*sys.argv[1:2])
