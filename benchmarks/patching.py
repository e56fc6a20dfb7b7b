"""Activation patching of a GPT-2, layer by position, raced against TransformerLens and nnsight.

All run one sweep on equal weights: for every layer and position, they run the corrupt prompt with
the stream after that block at that position from the clean prompt, and compute the difference of
two logits at the last position. The peers run in a separate process, with PyTorch, in turns with
tapax. Before a time counts, logits and sweeps must agree to 1e-4.

`by pair` follows the guides of the peers: one run for each layer and position. `lean` also leaves
out the logits of other positions. `by layer` puts all positions into one batch; `skipping` leaves
out the blocks before the patch, as tapax does automatically.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpt2
from benchmarks.measure import Result
from tapax.attribute import activation_patching

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 64
TOLERANCE = 1e-4


def raced(width: int, bar: float, limit: float, rounds: int) -> list[Result]:
    """Compare tapax with the peers; `limit` is the longest time for one sweep of a peer."""
    cfg = gpt2.Config(width=width, heads=max(4, width // 64))
    params = gpt2.init(0, cfg)
    rng = np.random.default_rng(1)
    clean, corrupt = rng.integers(cfg.vocab, size=(2, LENGTH))
    right, wrong = rng.integers(cfg.vocab, size=2)

    @jax.jit
    def metric(params: gpt2.Params, tokens: jax.Array) -> jax.Array:
        last = gpt2.stream(params, tokens[None], cfg)[:, -1]
        logits = gpt2.unembed(params, last)[0]
        return logits[right] - logits[wrong]

    sites = [f"blocks/{i}/resid" for i in range(cfg.layers)]

    def sweep() -> jax.Array:
        return activation_patching(metric, (params, clean), (params, corrupt), sites, range(LENGTH))

    start = time.perf_counter()
    expected = np.asarray(sweep())
    first = time.perf_counter() - start
    with _peers(params, cfg, limit, clean=clean, corrupt=corrupt, answers=[right, wrong]) as peers:
        times: dict[str, list[float]] = {"tapax": [], **{name: [] for name in peers.ways}}
        for _ in range(rounds):
            for name, seconds in times.items():
                start = time.perf_counter()
                if name == "tapax":
                    jax.block_until_ready(sweep())
                    seconds.append(time.perf_counter() - start)
                else:
                    seconds.append(peers.time(name))
    both = jnp.asarray(np.stack([clean, corrupt]))
    _require("logits", np.asarray(gpt2.forward(params, both, cfg)), peers.found["logits"])
    for name in peers.ways:
        _require(name, expected[peers.found[f"layers/{name}"]], peers.found[name])

    topic = f"patching 12 x {LENGTH}, width {width}"
    pairs = [name for name in peers.ways if name.endswith("by pair")]
    better = min(pairs, key=lambda name: float(np.median(times[name])))
    results = []
    for name in peers.ways:
        limit_of = 1 / bar if name == better else None
        results.append(Result.timed(topic, f"time over {name}", times, "tapax", name, limit_of))
    later = float(np.median(times["tapax"]))
    compiling = Result(topic, "first sweep, compiled, over the next", first, later, "s")
    return [*results, compiling]


class _Peers:
    """The process of the peers: their ways to sweep, and their results once it has finished."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.ways = list(json.loads(self._line()))
        self.found: dict[str, Any] = {}

    def time(self, way: str) -> float:
        assert self._process.stdin is not None
        print(way, file=self._process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("The process of the peers has ended; its error is above.")
        return line


@contextmanager
def _peers(params: gpt2.Params, cfg: gpt2.Config, limit: float, **tokens: Any) -> Iterator[_Peers]:
    made = [sys.executable, str(ROOT / "scripts" / "environment.py"), "--peers"]
    python = subprocess.run(made, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.npz" for name in ("weights", "tokens", "out")}
        gpt2.save(paths["weights"], params, cfg)
        np.savez(paths["tokens"], **tokens)
        script = ROOT / "benchmarks" / "peers" / "patching_torch.py"
        command = [python, str(script), "--serve", "--limit", str(limit)]
        for name, path in paths.items():
            command += [f"--{name}", str(path)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            peers = _Peers(process)
            yield peers
            process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
            process.wait()
        with np.load(paths["out"]) as found:
            peers.found.update(found)


def _require(what: str, actual: Any, expected: Any) -> None:
    distance = float(np.abs(actual - expected).max())
    if not distance <= TOLERANCE:
        raise AssertionError(f"{what} differs by {distance:.1e} (allowed {TOLERANCE:.1e}).")
