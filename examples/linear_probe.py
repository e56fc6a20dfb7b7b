"""Fit linear probes to a small GPT: after which block does it know the topic of a paragraph?

The dataset is that of `examples/sparse_autoencoder.py`, which has the topic of every word as a
column. Each block has a probe, which predicts the topic from the output of the block. All probes
learn from the same batches.

    python -m examples.linear_probe [--to FOLDER] [--quick]
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console

import tapax
from examples.sparse_autoencoder import (
    ROWS,
    TOPICS,
    Sizes,
    harvest_blocks,
    load_model,
    parse_arguments,
)

Weights = dict[str, tuple[jax.Array, jax.Array]]


def fit_probes(acts: tapax.Activations, epochs: int) -> dict[str, float]:
    """Fit a probe of the topic to each site; return the accuracy of each probe.

    The probes are tested on the last tenth of the batches, and learn from the others.
    """
    sites, stats = acts.sites, acts.stats
    optimizer = optax.adam(1e-2)
    weights: Weights = {
        site: (jnp.zeros((acts[site].shape[1], len(TOPICS))), jnp.zeros(len(TOPICS)))
        for site in sites
    }

    def read(weights: Weights, site: str, x: jax.Array) -> jax.Array:
        kernel, bias = weights[site]
        return (x - stats[site].mean.astype("f")) / stats[site].std.astype("f") @ kernel + bias

    @jax.jit
    def step(weights, state, batch):
        def loss(weights):
            scores = jnp.stack([read(weights, site, batch[site]) for site in sites])
            labels = jnp.broadcast_to(batch["topic"], scores.shape[:-1])
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(1).sum()

        updates, state = optimizer.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, updates), state

    @jax.jit
    def score(weights, batch):
        answers = {site: read(weights, site, batch[site]).argmax(-1) for site in sites}
        return {site: (found == batch["topic"]).mean() for site, found in answers.items()}

    def batches(start: int):
        return acts.batches(ROWS, seed=0, sites=[*sites, "topic"], start=start, drop_remainder=True)

    learned = len(batches(0)) - max(len(batches(0)) // 10, 1)
    state = optimizer.init(weights)
    for _ in range(epochs):
        for _, batch in zip(range(learned), batches(0), strict=False):
            weights, state = step(weights, state, batch)
    scores = [score(weights, batch) for batch in batches(learned)]
    return {site: float(np.mean([found[site] for found in scores])) for site in sites}


def plot(right: dict[str, float], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(4, 3.2), layout="constrained")
    axes.bar(list(right), [100 * share for share in right.values()], color="#0072B2")
    axes.axhline(100 / len(TOPICS), color="0.6", lw=1)
    axes.set(ylabel="right topics, %", ylim=(0, 100), title="A linear probe of each block")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def run(to: Path, sizes: Sizes, console: Console) -> dict[str, float]:
    to.mkdir(parents=True, exist_ok=True)
    acts = harvest_blocks(load_model(to / "model.safetensors", sizes), to / "acts", sizes)
    right = fit_probes(acts, sizes.epochs // 2)
    for site, share in right.items():
        console.print(f"{site}: {share:.1%} of the topics right")
    plot(right, to / "probe.png")
    return right


if __name__ == "__main__":
    run(*parse_arguments("linear_probe"), Console())
