"""Gradient flow in a small GPT, read from its own jitted train step.

A six-layer character model in plain JAX learns a nursery rhyme. `jt.sow` names the values worth
seeing; while the model trains, those marks are not in the program at all. `jt.capture(train_step)`
then returns, from the very step that trained the model, what every named value was and the
gradient that flowed back into it.

    python examples/gradient_flow.py [picture.png]
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

import jaxtap as jt

LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 6, 64, 4, 48, 8, 150
Params = dict[str, Any]


def rhyme() -> str:
    """The house that Jack built: each verse wraps the one before it."""
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


def init(rng: np.random.Generator, vocab: int) -> Params:
    def matrix(rows: int, cols: int, gain: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0, gain * rows**-0.5, (rows, cols)), jnp.float32)

    def block() -> Params:
        return {
            "qkv": matrix(WIDTH, 3 * WIDTH), "proj": matrix(WIDTH, WIDTH, gain=LAYERS**-0.5),
            "up": matrix(WIDTH, 4 * WIDTH), "down": matrix(4 * WIDTH, WIDTH, gain=LAYERS**-0.5),
        }  # fmt: skip

    return {
        "embed": matrix(vocab, WIDTH), "place": matrix(LENGTH, WIDTH),
        "blocks": [block() for _ in range(LAYERS)], "head": matrix(WIDTH, vocab),
    }  # fmt: skip


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(p: Params, x: jax.Array) -> jax.Array:
    heads = (x @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1)
    q, k, v = jnp.split(heads.swapaxes(1, 2), 3, axis=-1)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    scores = jnp.where(causal, q @ k.mT * k.shape[-1] ** -0.5, -jnp.inf)
    return (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape) @ p["proj"]


def mlp(p: Params, x: jax.Array) -> jax.Array:
    return jt.sow(jax.nn.relu(x @ p["up"]), "relu") @ p["down"]


def gpt(params: Params, tokens: jax.Array) -> jax.Array:
    x = jt.sow(params["embed"][tokens] + params["place"], "embed")
    for i, p in enumerate(params["blocks"]):
        with jt.scope(f"block{i}"):
            x = x + jt.sow(attention(p, norm(x)), "attn")
            x = x + jt.sow(mlp(p, norm(x)), "mlp")
            x = jt.sow(x, "out")
    x = jt.sow(norm(x), "norm")
    return jt.sow(x @ params["head"], "logits")


def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(gpt(params, tokens[:, :-1]))
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()


@jax.jit
def train_step(params: Params, state: Params, tokens: jax.Array):
    """One step of Adam. Nothing here knows that it will be looked into."""
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    t = state["t"] + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], grads)
    rate = 3e-3 * jnp.sqrt(1 - 0.99**t) / (1 - 0.9**t)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, m, v)
    return params, {"m": m, "v": v, "t": t}, loss


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def statistics(taps: jt.Taps) -> Table:
    """Each site with what its value and its gradient look like."""
    table = Table(title="Inside one jitted train step", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("\nsite", style="bold", no_wrap=True)
    table.add_column("\nshape", style="dim", no_wrap=True)
    for what, colour in (("value", "cyan"), ("gradient", "magenta")):
        for head in (f"{what}\nrms", "\nmax", "\nzero", "\nnan"):
            table.add_column(head, justify="right", style=colour, no_wrap=True)
    for site in taps.sites.names:
        row = [site, "×".join(map(str, taps.values[site].shape))]
        for x in map(np.asarray, (taps.values[site], taps.grads[site])):
            row += [f"{rms(x):.2g}", f"{abs(x).max():.2g}"]
            row += [f"{np.mean(x == 0):.0%}", f"{np.mean(~np.isfinite(x)):.0%}"]
        table.add_row(*row)
    return table


def plot(first: jt.Taps, last: jt.Taps, path: str) -> None:
    """Root mean square of values and of gradients by layer, before and after training."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    # What an mlp adds to the stream has the gradient of the stream: the wide line shows below it.
    looks: dict[str, Any] = {
        "out": {"label": "residual stream", "color": "0.78", "lw": 6},
        "attn": {"label": "attention", "color": "#0072B2", "lw": 1.6},
        "mlp": {"label": "mlp", "color": "#D55E00", "lw": 1.6},
    }
    before: Any = {"label": "before training", "ls": "--", "mfc": "white"}
    after: Any = {"label": f"after {STEPS} steps", "ls": "-"}
    titles = {"values": "Values, forward", "grads": "Gradients, backward"}
    for axis, what in zip(axes, titles, strict=True):
        for taps, when in ((first, before), (last, after)):
            arrays = getattr(taps, what)
            for part, look in looks.items():
                ys = [rms(arrays[f"block{i}/{part}"]) for i in range(LAYERS)]
                ys = [rms(arrays["embed"]) if part == "out" else np.nan, *ys]
                axis.plot(ys, marker="" if part == "out" else "o", ms=5, **(look | when))
        axis.set(yscale="log", xlabel="block", title=titles[what])
        low, high = np.log10(axis.get_ylim())
        axis.set_ylim(10 ** np.floor(low), 10 ** np.ceil(high))
        axis.set_xticks(range(LAYERS + 1), ["embed", *range(LAYERS)])
        axis.grid(axis="y", color="0.9")
    axes[0].set_ylabel("root mean square")
    keys = [Line2D([], [], **look) for look in looks.values()]
    keys += [Line2D([], [], color="k", marker="o", ms=5, **when) for when in (before, after)]
    figure.legend(handles=keys, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=200)


def main(picture: str = "gradient_flow.png") -> None:
    console, text = Console(), rhyme()
    alphabet = sorted(set(text))
    corpus = np.array([alphabet.index(c) for c in text])
    rng = np.random.default_rng(0)

    def batch() -> jax.Array:
        starts = rng.integers(len(corpus) - LENGTH, size=(BATCH, 1))
        return jnp.asarray(corpus[starts + np.arange(LENGTH + 1)])

    params = untrained = init(rng, len(alphabet))
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = start = {"m": zeros, "v": zeros, "t": jnp.zeros((), jnp.int32)}

    shown = ("training", BarColumn(), MofNCompleteColumn(), "loss {task.fields[loss]:.3f}")
    with Progress(*shown, console=console) as progress:
        task = progress.add_task("", total=STEPS, loss=np.nan)
        for _ in range(STEPS):
            params, state, loss = train_step(params, state, batch())
            progress.update(task, advance=1, loss=float(loss))

    look, tokens = jt.capture(train_step), batch()
    _, first = look(untrained, start, tokens)
    captured, last = look(params, state, tokens)
    console.print(statistics(last))

    plain = train_step(params, state, tokens)
    pairs = zip(jax.tree.leaves(captured), jax.tree.leaves(plain), strict=True)
    gap = max(float(np.abs(a - b).max()) for a, b in pairs)
    assert gap < 1e-5, f"The captured step differs from the plain step by {gap}."
    console.print(f"Captured and plain step return the same (largest difference {gap:.1e}).")
    plot(first, last, picture)
    console.print(f"Gradient flow by layer: {Path(picture).resolve()}", soft_wrap=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
