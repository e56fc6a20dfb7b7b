"""A small model of plain JAX whose values NumPy computes exactly, and its batches.

Every number is a small multiple of a power of two, so that no sum rounds, and values are equal
bit for bit under every compiler.

`python -m tests.models.harvested FOLDER UNITS INDEX COUNT` harvests it as one of several workers,
in a process that a test can kill.
"""

import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import tapax

WORDS, WIDTH = 13, 4
TABLE = (np.arange(WORDS * WIDTH).reshape(WORDS, WIDTH) % 7 - 3).astype(np.float32)
WEIGHTS = (np.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) % 5 - 2).astype(np.float32) / 2


def model(tokens):
    """Embed tokens, and apply one layer with a rectifier."""
    x = tapax.sow(jnp.asarray(TABLE)[tokens], "net/embed")
    h = tapax.sow(jnp.maximum(x @ WEIGHTS, 0), "net/hidden")
    return tapax.sow(h.sum(-1), "net/score")


def embed(tokens):
    """Compute the site `net/embed` by NumPy."""
    return TABLE[np.asarray(tokens)]


def hidden(tokens):
    """Compute the site `net/hidden` by NumPy."""
    return np.maximum(embed(tokens) @ WEIGHTS, 0)


def make_batches(count=7, shape=(2, 5)):
    """Make batches of tokens; the last has only one example."""
    generator = np.random.default_rng(0)
    found = [generator.integers(0, WORDS, shape).astype(np.int32) for _ in range(count)]
    return [*found[:-1], found[-1][:1]]


class SlowBatches(list):
    """Batches that take some time to read, so that a harvest can be killed while it runs."""

    def __getitem__(self, number):
        time.sleep(0.004)
        return super().__getitem__(number)


def read_files(folder):
    """Read the files of a dataset, without others in its folder."""
    found = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def harvest(folder, worker=(0, 1), batches=None, **options):
    """Harvest the two wide sites of the model."""
    batches = make_batches() if batches is None else batches
    options = {"values": ["net/embed", "net/hidden"], "units": 4, **options}
    return tapax.harvest(model, batches, to=folder, worker=worker, **options)


if __name__ == "__main__":
    UNITS, INDEX, COUNT = map(int, sys.argv[2:])
    harvest(Path(sys.argv[1]), (INDEX, COUNT), SlowBatches(make_batches(2 * UNITS)), units=UNITS)
