"""BatchEnsemble layers against those of probly, with the same weights, in one process.

python -m benchmarks.peers.batch_ensemble ROUNDS

Their results must agree to 1e-6. In float32 both layers have the same operations, so the script
also compares the counts of the compiler, which are exact. In bfloat16 the layer of probly computes
in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from probly.layers import flax as probly

from benchmarks.jax_peers import tell
from benchmarks.measure import Result, build, race, require_equal
from tapax import nn

MEMBERS = 4
TOLERANCE = 1e-6

# Name, the base layer for a dtype, and the inputs of all members.
CASES: list[tuple[str, Callable[[Any], nnx.Module], tuple[int, ...]]] = [
    ("Linear", lambda d: nnx.Linear(1024, 1024, dtype=d, rngs=nnx.Rngs(0)), (4 * 64, 1024)),
    ("Conv", lambda d: nnx.Conv(64, 64, (3, 3), dtype=d, rngs=nnx.Rngs(0)), (4 * 4, 16, 16, 64)),
]


def layers(rounds: int) -> list[Result]:
    """Compare the layers of tapax with those of probly."""
    results = []
    for name, base, shape in CASES:
        for dtype in (jnp.float32, jnp.bfloat16):
            x = jax.random.normal(jax.random.key(0), shape, dtype)
            cls = f"BatchEnsemble{name}"
            ours = getattr(nn, cls)(base(dtype), nnx.Rngs(1), MEMBERS)
            theirs = getattr(probly, cls)(base(dtype), nnx.Rngs(1), MEMBERS)
            both = {"tapax": ours, "probly": theirs}
            states = {name: nnx.split(layer) for name, layer in both.items()}
            built = {
                name: build(lambda s, x, g=g: nnx.merge(g, s)(x), s, x)
                for name, (g, s) in states.items()
            }
            runs = {name: lambda f=f, s=states[name][1], x=x: f(s, x) for name, f in built.items()}
            exact = dtype == jnp.float32
            topic = f"{cls} {list(shape)} {jnp.dtype(dtype).name}"
            out = {name: run() for name, run in runs.items()}
            require_equal(topic, out["tapax"], out["probly"], TOLERANCE if exact else 0.01)
            times = race(runs, rounds, calls=4)
            if exact:
                flops, moved = (_cost(built, key) for key in ("flops", "bytes accessed"))
                results.append(Result(topic, "operations over probly", *flops, "MFLOP", bar=1.0))
                results.append(Result(topic, "memory moved over probly", *moved, "MB", bar=1.0))
            bar = 1.02 if exact else None
            results.append(
                Result.timed(topic, "time over probly", times, "tapax", "probly", bar=bar)
            )
    return results


def _cost(built: dict[str, Any], key: str) -> tuple[float, float]:
    """Return the counts of the compiler for both programs, in millions."""
    ours, theirs = (built[name].cost_analysis()[key] / 1e6 for name in ("tapax", "probly"))
    return ours, theirs


if __name__ == "__main__":
    tell(layers(int(sys.argv[1])))
