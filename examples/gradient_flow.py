"""Capture the gradient flow in a small GPT from its unmodified, jitted train step.

A six-layer character model in Flax NNX learns a nursery rhyme. Neither the model nor its train step
mentions tapax. `tapax.capture(train_step)` returns the output of every layer, and the gradient of
the loss with respect to it, from a step that also updates the model and the optimizer as the plain
step does.

    python examples/gradient_flow.py [picture.png]

It saves a picture of the gradient flow, and next to it a page with both captures.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

import tapax

LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 6, 64, 4, 48, 8, 150


def rhyme() -> str:
    """Write the rhyme of the house that Jack built, whose verses contain the verses before them."""
    links = (
        ("malt", "lay in"), ("rat", "ate"), ("cat", "killed"), ("dog", "worried"),
        ("cow with the crumpled horn", "tossed"), ("maiden all forlorn", "milked"),
        ("man all tattered and torn", "kissed"), ("priest all shaven and shorn", "married"),
        ("cock that crowed in the morn", "waked"), ("farmer sowing his corn", "kept"),
    )  # fmt: skip
    text, thing = "", "house that Jack built"
    for noun, verb in links:
        text += f"This is the {thing}.\n\n"
        thing = f"{noun}\nThat {verb} the {thing}"
    return text + f"This is the {thing}.\n"


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = MLP(rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x), mask=mask)
        return x + self.mlp(self.norm2(x))


class GPT(nnx.Module):
    def __init__(self, vocab: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, WIDTH, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Take one step of Adam. This is an ordinary train step, which does not mention tapax."""

    def loss_fn(model: GPT) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def statistics(taps: tapax.Taps) -> Table:
    """Make a table of the value and the gradient of every module."""
    table = Table(title="Inside one nnx.jit train step", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("module", style="bold", no_wrap=True)
    table.add_column("class", style="green", no_wrap=True, max_width=12)
    table.add_column("shape", style="dim", no_wrap=True)
    for head, colour in (("value", "cyan"), ("gradient", "magenta")):
        table.add_column(head, justify="right", style=colour, no_wrap=True)
        table.add_column("zero", justify="right", style=colour, no_wrap=True)
    for site in taps.sites:
        x, g = np.asarray(taps.values[site.name]), np.asarray(taps.grads[site.name])
        row = [site.name, site.module.__name__ if site.module else "", "×".join(map(str, x.shape))]
        for array in (x, g):
            row += [f"{rms(array):.2g}", f"{np.mean(array == 0):.0%}"]
        table.add_row(*row)
    return table


def plot(first: tapax.Taps, last: tapax.Taps, path: str) -> None:
    """Plot the root mean squares of values and gradients by layer, before and after training."""
    captures = {"before training": first, f"after {STEPS} steps": last}
    shown = ["GPT/embed", "GPT/blocks/*", "**/attn", "**/mlp"]
    tapax.plot.roles(captures, at=shown).savefig(path, dpi=200)


def main(picture: str = "gradient_flow.png") -> None:
    console, text = Console(), rhyme()
    alphabet = sorted(set(text))
    corpus = np.array([alphabet.index(c) for c in text])
    rng = np.random.default_rng(0)

    def batch() -> jax.Array:
        starts = rng.integers(len(corpus) - LENGTH, size=(BATCH, 1))
        return jnp.asarray(corpus[starts + np.arange(LENGTH + 1)])

    model = GPT(len(alphabet), nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    look, tokens = tapax.capture(train_step), batch()
    _, first = look(model, optimizer, tokens)  # a step like any other

    shown = ("training", BarColumn(), MofNCompleteColumn(), "loss {task.fields[loss]:.3f}")
    with Progress(*shown, console=console) as progress:
        task = progress.add_task("", total=STEPS, loss=np.nan)
        for _ in range(STEPS):
            loss = train_step(model, optimizer, batch())
            progress.update(task, advance=1, loss=float(loss))

    twin, twin_optimizer = nnx.clone((model, optimizer))
    _, last = look(model, optimizer, tokens)
    console.print(statistics(last))

    train_step(twin, twin_optimizer, tokens)
    pairs = zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(twin)), strict=True)
    gap = max(float(np.abs(a - b).max()) for a, b in pairs)
    assert gap < 1e-5, f"The captured step differs from the plain step by {gap}."
    console.print(f"Captured and plain step leave the same model (difference {gap:.1e}).")
    plot(first, last, picture)
    console.print(f"Gradient flow by layer: {Path(picture).resolve()}", soft_wrap=True)
    page = Path(picture).with_suffix(".html")
    letters = [[alphabet[i] for i in line] for line in tokens[:, :-1].tolist()]
    tapax.view(first, last, tokens=letters).save(page)
    console.print(f"Both captures as a page, to open in a browser: {page.resolve().as_uri()}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
