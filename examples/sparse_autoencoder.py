"""Train a sparse autoencoder of a small GPT from a dataset of its activations.

The GPT reads made-up text, word by word: sentences about the sea, the kitchen, the garden and the
sky, which share their adjectives and adverbs. To guess the next noun, it must remember the topic of
the paragraph. `tapax.harvest` stores the output of every block, with the topic of each word as a
column, and a top-k autoencoder learns from that dataset (Gao et al., Scaling and evaluating sparse
autoencoders, 2024). `examples/linear_probe.py` predicts the topic from it.

    python -m examples.sparse_autoencoder [--to FOLDER] [--quick]

The folder keeps the model and the dataset, so a second run, or a run after a kill, continues there.
"""

import argparse
import dataclasses
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save_file

import tapax

TOPICS = {
    "sea": ("ship wave sailor anchor harbour gull net tide", "sails sinks drifts floats"),
    "kitchen": ("pan cook soup oven knife spoon onion plate", "boils burns cuts tastes"),
    "garden": ("rose hedge spade bee lawn root seed fence", "grows blooms digs withers"),
    "sky": ("cloud star moon comet swallow thunder kite dawn", "shines falls rises fades"),
}
SHARED = {"adjective": "old small bright cold heavy quiet", "adverb": "slowly again alone twice"}
WORDS = sorted(
    {"the", "and", "."}.union(
        *(part.split() for topic in TOPICS.values() for part in topic),
        *(words.split() for words in SHARED.values()),
    )
)
SITE = "GPT/blocks/1"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the model, the text, the dataset and the autoencoder."""

    width: int = 64
    blocks: int = 3
    length: int = 32
    steps: int = 400
    batches: int = 96
    latents: int = 256
    active: int = 8
    epochs: int = 12


QUICK = Sizes(width=16, blocks=2, length=16, steps=30, batches=6, latents=32, active=4, epochs=2)
BATCH, ROWS = 32, 1024


def write_text(count: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """Write paragraphs of `length` words, and the topic of the paragraph of each word."""
    rng = np.random.default_rng(seed)
    tokens, topics = np.zeros((2, count, length), np.int32)
    for row in range(count):
        words: list[str] = []
        about: list[int] = []
        while len(words) < length:
            topic = int(rng.integers(len(TOPICS)))
            for _ in range(rng.integers(2, 4)):
                sentence = _write_sentence(rng, list(TOPICS)[topic])
                words += sentence
                about += [topic] * len(sentence)
        tokens[row] = [WORDS.index(word) for word in words[:length]]
        topics[row] = about[:length]
    return {"tokens": tokens, "topic": topics}


def _write_sentence(rng: np.random.Generator, topic: str) -> list[str]:
    nouns, verbs = (part.split() for part in TOPICS[topic])
    adjectives, adverbs = (SHARED[kind].split() for kind in ("adjective", "adverb"))

    def thing() -> list[str]:
        return ["the", *rng.choice(adjectives, rng.integers(0, 2)), str(rng.choice(nouns))]

    sentence = [*thing(), str(rng.choice(verbs))]
    if rng.random() < 0.5:
        sentence += ["and", *thing(), str(rng.choice(verbs))]
    return [str(word) for word in (*sentence, *rng.choice(adverbs, rng.integers(0, 2)), ".")]


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x), mask=mask)
        return x + self.down(nnx.relu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.embed = nnx.Embed(len(WORDS), sizes.width, rngs=rngs)
        self.place = nnx.Embed(sizes.length, sizes.width, rngs=rngs)
        self.blocks = nnx.List([Block(sizes.width, rngs) for _ in range(sizes.blocks)])
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.head = nnx.Linear(sizes.width, len(WORDS), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    logits = model(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_model(sizes: Sizes) -> GPT:
    model = GPT(sizes, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> None:
        optimizer.update(model, nnx.grad(loss_fn)(model, tokens))

    tokens = write_text(sizes.steps * BATCH // 4, sizes.length, seed=1)["tokens"]
    rng = np.random.default_rng(0)
    for _ in range(sizes.steps):
        train_step(model, optimizer, tokens[rng.integers(len(tokens), size=BATCH)])
    return model


def load_model(path: Path, sizes: Sizes) -> GPT:
    """Read the model of an earlier run, or train it: a dataset belongs to one set of weights."""
    if not path.exists():
        leaves = jax.tree.leaves(nnx.state(train_model(sizes), nnx.Param))
        save_file({f"{i:03d}": np.asarray(leaf) for i, leaf in enumerate(leaves)}, path)
    model = GPT(sizes, nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    stored = [jnp.asarray(leaf) for _, leaf in sorted(load_file(path).items())]
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(state), stored))
    return model


def harvest_blocks(model: GPT, to: Path, sizes: Sizes) -> tapax.Activations:
    """Store the output of every block, and the topic of each word."""
    text = write_text(sizes.batches * BATCH, sizes.length, seed=2)
    cut = [
        {name: x[i : i + BATCH] for name, x in text.items()}
        for i in range(0, len(text["tokens"]), BATCH)
    ]
    return tapax.harvest(
        lambda batch: model(batch["tokens"]),
        cut,
        to=to,
        values="GPT/blocks/*",
        beside=lambda batch: {"topic": batch["topic"]},
        units=8,
        seed=0,
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["encoder", "decoder", "bias", "center", "scale"],
    meta_fields=["active"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class SparseAutoencoder:
    """A dictionary of directions; each activation is about a sum of `active` of them."""

    encoder: jax.Array
    decoder: jax.Array
    bias: jax.Array
    center: jax.Array
    scale: jax.Array
    active: int

    @classmethod
    def make(cls, acts: tapax.Activations, sizes: Sizes, key: jax.Array) -> "SparseAutoencoder":
        """Start from random directions, around the mean that the harvest measured."""
        stats = acts.stats[SITE]
        decoder = jax.random.normal(key, (sizes.latents, sizes.width))
        decoder = decoder / jnp.linalg.norm(decoder, axis=1, keepdims=True)
        scale = np.sqrt(stats.var.sum() / sizes.width)
        return cls(
            encoder=decoder.T,
            decoder=decoder,
            bias=jnp.zeros(sizes.latents),
            center=jnp.asarray(stats.mean, jnp.float32),
            scale=jnp.asarray(scale, jnp.float32),
            active=sizes.active,
        )

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the latents of activations: positive numbers, at most `active` of each row."""
        scores = jax.nn.relu(((x - self.center) / self.scale) @ self.encoder + self.bias)
        least = jax.lax.top_k(scores, self.active)[0][..., -1:]
        return jnp.where(scores >= least, scores, 0)

    def decode(self, latents: jax.Array) -> jax.Array:
        return (latents @ self.decoder) * self.scale + self.center

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decode(self.encode(x))


def train_autoencoder(
    acts: tapax.Activations, sizes: Sizes
) -> tuple[SparseAutoencoder, list[float]]:
    """Train on shuffled rows of the dataset; return the share of variance left, by batch."""
    sae = SparseAutoencoder.make(acts, sizes, jax.random.key(0))
    steps = sizes.epochs * len(acts.batches(ROWS, drop_remainder=True))
    optimizer = optax.adam(optax.cosine_decay_schedule(4e-3, max(steps, 1)))
    parts = ("encoder", "decoder", "bias")
    trained = {name: getattr(sae, name) for name in parts}
    state = optimizer.init(trained)

    @jax.jit
    def step(trained, state, sae, x):
        def left(trained):
            error = dataclasses.replace(sae, **trained)(x) - x
            return jnp.sum(error**2) / jnp.sum((x - sae.center) ** 2)

        loss, grads = jax.value_and_grad(left)(trained)
        updates, state = optimizer.update(grads, state)
        trained = optax.apply_updates(trained, updates)
        decoder = trained["decoder"]  # the size of a latent is that of what it adds
        trained["decoder"] = decoder / jnp.linalg.norm(decoder, axis=1, keepdims=True)
        return trained, state, loss

    losses: list[jax.Array] = []
    for epoch in range(sizes.epochs):
        for batch in acts.batches(ROWS, seed=epoch, sites=SITE, drop_remainder=True):
            trained, state, loss = step(trained, state, sae, batch[SITE])
            losses.append(loss)
    return dataclasses.replace(sae, **trained), np.asarray(losses).tolist()


@dataclasses.dataclass(frozen=True)
class Report:
    """Measures of the quality of an autoencoder."""

    explained: float
    l0: float
    frequency: np.ndarray
    losses: dict[str, float]

    @property
    def dead(self) -> int:
        """The number of latents that no row of the dataset uses."""
        return int((self.frequency == 0).sum())

    @property
    def recovered(self) -> float:
        """The share of the loss added by zeros that the reconstruction avoids."""
        plain, rebuilt, zeros = self.losses.values()
        return (zeros - rebuilt) / (zeros - plain)


def judge(sae: SparseAutoencoder, model: GPT, acts: tapax.Activations, sizes: Sizes) -> Report:
    """Measure the autoencoder on the dataset, and as a replacement of the block on other text."""

    @jax.jit
    def measure(sae, x):
        latents = sae.encode(x)
        error = jnp.sum((sae.decode(latents) - x) ** 2)
        return error, (latents > 0).sum(0)

    error, used = 0.0, np.zeros(sizes.latents)
    for batch in acts.batches(ROWS, sites=SITE):
        found = measure(sae, batch[SITE])
        error, used = error + float(found[0]), used + np.asarray(found[1])
    held_out = write_text(4 * BATCH, sizes.length, seed=3)["tokens"]
    losses = {"plain": float(loss_fn(model, held_out))}
    for name, change in (("reconstructed", sae), ("zeros", 0.0)):
        losses[name] = float(tapax.edit(loss_fn, values={SITE: change})(model, held_out))
    explained = 1 - error / float(acts.stats[SITE].squares.sum())
    return Report(explained, float(used.sum() / len(acts)), used / len(acts), losses)


def top_contexts(
    sae: SparseAutoencoder, acts: tapax.Activations, latents: list[int], count: int = 4
) -> dict[int, list[str]]:
    """Return the words around the rows where each latent is largest."""
    best = {latent: [] for latent in latents}
    encode = jax.jit(lambda sae, x: sae.encode(x)[:, jnp.array(latents)])
    start = 0
    for batch in acts.batches(ROWS, sites=SITE):
        found = np.asarray(encode(sae, batch[SITE]))
        for column, latent in enumerate(latents):
            rows = np.argsort(-found[:, column])[:count]
            best[latent] += [(float(found[row, column]), start + int(row)) for row in rows]
        start += len(found)
    return {
        latent: [_context(acts, row) for size, row in sorted(found, reverse=True)[:count] if size]
        for latent, found in best.items()
    }


def _context(acts: tapax.Activations, row: int, before: int = 5) -> str:
    """Return the words before a row, and the word of the row in brackets."""
    start = row - min(before, int(acts["position"][row]))
    *words, last = (WORDS[token] for token in acts["token"][start : row + 1])
    return " ".join([*words, f"[{last}]"])


def plot(report: Report, left: list[float], path: Path) -> None:
    """Plot the training of the autoencoder, the use of its latents, and the losses."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    axes[0].plot(100 * (1 - np.asarray(left)), color="#0072B2")
    axes[0].set(xlabel="batches", ylabel="explained variance, %", ylim=(0, 100))
    axes[0].set_title("Training from the dataset")
    used = report.frequency[report.frequency > 0]
    axes[1].hist(np.log10(used), bins=30, color="#0072B2")
    axes[1].set(xlabel="log10 of the share of rows", ylabel="latents")
    axes[1].set_title(f"Use of the latents, {report.dead} dead")
    axes[2].bar(list(report.losses), list(report.losses.values()), color="#0072B2")
    axes[2].set(ylabel="loss of the GPT", title=f"{SITE}, {report.recovered:.1%} recovered")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def show(report: Report, contexts: dict[int, list[str]], console: Console) -> None:
    table = Table(title="Top-k autoencoder", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in ("explained", "L0", "dead", "loss", "reconstructed", "zeros", "recovered"):
        table.add_column(head, justify="right")
    numbers = (f"{loss:.3f}" for loss in report.losses.values())
    dead = f"{report.dead} of {len(report.frequency)}"
    table.add_row(
        f"{report.explained:.1%}", f"{report.l0:.1f}", dead, *numbers, f"{report.recovered:.1%}"
    )
    console.print(table)
    for latent, lines in contexts.items():
        console.print(f"latent {latent}, {report.frequency[latent]:.1%} of the rows", style="bold")
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False)


def run(to: Path, sizes: Sizes, console: Console) -> Report:
    """Run the whole example; return the measures of the autoencoder."""
    start = time.perf_counter()
    to.mkdir(parents=True, exist_ok=True)
    model = load_model(to / "model.safetensors", sizes)
    console.print(f"The model is ready after {time.perf_counter() - start:.0f} s.")
    acts = harvest_blocks(model, to / "acts", sizes)
    console.print(acts)
    sae, left = train_autoencoder(acts, sizes)
    report = judge(sae, model, acts, sizes)
    often = [int(n) for n in np.argsort(-report.frequency) if report.frequency[n] > 1e-3]
    latents = often[:: -(-len(often) // 8)]  # from those used most to those used least
    contexts = top_contexts(sae, acts, latents)
    show(report, contexts, console)
    plot(report, left, to / "autoencoder.png")
    lines = [f"{latent}: {line}" for latent, found in contexts.items() for line in found]
    (to / "contexts.txt").write_text("\n".join(lines) + "\n")
    console.print(f"Pictures and contexts: {to.resolve()}", soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.0f} s in all")
    return report


def parse_arguments(name: str) -> tuple[Path, Sizes]:
    """Read the command line of the module `name`."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}")
    parser.add_argument("--to", type=Path, default=Path("sparse_autoencoder"), metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="a toy size: seconds")
    options = parser.parse_args()
    return options.to, QUICK if options.quick else Sizes()


def main() -> None:
    to, sizes = parse_arguments("sparse_autoencoder")
    report = run(to, sizes, Console())
    assert sizes is QUICK or (report.explained > 0.8 and report.recovered > 0.9)


if __name__ == "__main__":
    main()
