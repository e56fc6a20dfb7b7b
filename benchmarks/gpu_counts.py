"""Counting on a GPU: histograms and quantiles of one large value.

    PYTHONPATH=. python -m benchmarks.gpu_counts [--log2-size 28] [--rounds 10] [--json PATH]

The script checks each way to count against NumPy, and then times it over the sum of the value,
which reads the value once. The quantiles use the default sketch, which counts by a scatter or in
several copies.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tapax
from benchmarks import measure
from benchmarks.measure import Result, race
from tapax.reduce._scattered_counts import count_by_scatter, count_in_copies

R = tapax.reduce
BINS = 4661
"""The number of bins, about that of the default sketch of `quantiles`."""

EDGES = {28: np.linspace(-4, 4, 29).tolist(), 256: np.linspace(-4, 4, 257).tolist()}


def captured(reducer: Any) -> Callable[[jax.Array], Any]:
    """Make a function that computes only the statistic of a value."""
    capture = tapax.capture(lambda x: tapax.sow(x, "h").ravel()[0], values={"h": reducer})
    return lambda x: capture(x)[1].values["h"]


def places(x: jax.Array) -> jax.Array:
    """Compute the bins of a logarithmic sketch, the part of a quantile before counting."""
    magnitude = jnp.maximum(jnp.abs(x.astype(jnp.float32)), 1e-10)
    return jnp.clip((jnp.log(magnitude) * 50 + BINS // 2).astype(jnp.int32), 0, BINS - 1).ravel()


def ways() -> dict[str, Callable[[jax.Array], Any]]:
    found: dict[str, Callable[[jax.Array], Any]] = {
        "one read: sum": lambda x: x.sum(dtype=jnp.float32),
        "rms": captured(R.rms),
        "log2 histogram": captured(R.histogram(log2=(-14, 12))),
        "quantiles": captured(R.quantiles()),
        "quantiles, sample=1/16": captured(R.quantiles(sample=1 / 16)),
        "sketch by scatter": lambda x: count_by_scatter(places(x), bins=BINS)[0],
    }
    for count, edges in EDGES.items():
        found[f"histogram, {count} bins"] = captured(R.histogram(edges))
    for copies in (16, 64, 256, 1024):
        count = partial(count_in_copies, bins=BINS, copies=copies)
        found[f"sketch in {copies} copies"] = lambda x, count=count: count(places(x))[0]
    return found


def check(size: int) -> None:
    """Raise unless the counts of a smaller value equal those of NumPy."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(size // 1024, 1024)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    expected = np.bincount(np.asarray(places(x)), minlength=BINS)
    for copies in (16, 256):
        (found,) = jax.jit(partial(count_in_copies, bins=BINS, copies=copies))(places(x))
        np.testing.assert_array_equal(found, expected)
    for edges in EDGES.values():
        found = jax.jit(captured(R.histogram(edges)))(x)
        np.testing.assert_array_equal(found, np.histogram(wide, edges)[0])
    ranks = [0.05, 0.25, 0.5, 0.75, 0.95]
    exact = np.quantile(wide, ranks, method="lower")
    np.testing.assert_allclose(jax.jit(captured(R.quantiles(ranks)))(x), exact, rtol=0.0101)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_counts", description="Ways to count on a GPU."
    )
    parser.add_argument("--log2-size", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    check(2 ** min(options.log2_size, 22))
    shape = (2 ** (options.log2_size - 11), 2048)
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    built = {name: jax.jit(f).lower(x).compile() for name, f in ways().items()}
    # Several calls in a row, as waiting for a single one takes longer than one read.
    entrants = {name: lambda f=f: f(x) for name, f in built.items()}
    times = race(entrants, options.rounds, calls=20)
    base = "one read: sum"
    topic = f"2^{options.log2_size} bfloat16"
    results = [Result.timed(topic, name, times, name, base) for name in built if name != base]
    measure.show(results)
    if options.json:
        options.json.write_text(json.dumps([r.record() for r in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
