"""Datasets of activations: harvesting, reading, and training from them.

Bars for rates are bars for times here: at least 0.9 of a rate is at most 1.11 of the time. Both
sides sync the files that they write to the disk. The topics of a CPU are in `benchmarks.run`, those
of a GPU in `benchmarks.gpu`.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tapax
from benchmarks.gpt import Config, unrolled
from benchmarks.measure import MIB, Result, race

SITES = 10
"""The number of layers of the GPT to harvest."""


@contextmanager
def folder(parent: str | None = None) -> Iterator[Path]:
    """Make a new folder, and remove it afterwards."""
    path = Path(tempfile.mkdtemp(prefix="tapax-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def numbered(parent: str | None = None) -> Iterator[Iterator[Path]]:
    """Yield paths in a new folder, one after the other; each path removes its predecessor."""
    with folder(parent) as root:

        def paths() -> Iterator[Path]:
            for number in itertools.count():
                yield root / str(number)
                shutil.rmtree(root / str(number), ignore_errors=True)

        yield paths()


def looked_up(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Look up rows of a table: a model with almost no computation."""
    return tapax.sow(jnp.take(table, rows, axis=0), "h")


def scaled(table: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply a table: a model that takes less time than a copy of its result."""
    return tapax.sow(table * scale, "h")


def written(rounds: int) -> list[Result]:
    """Compare harvesting to disk with writing the same bytes and shards with safetensors.

    Both use the same number of threads and sync every shard. The harvest includes its start, which
    traces and compiles.
    """
    width, rows, units, batches = 1024, 4096, 32, 128
    table = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    fn = functools.partial(scaled, jnp.asarray(table))
    data = np.arange(1, batches + 1, dtype=np.float32).reshape(batches, 1, 1)
    shard = {"h": np.concatenate([table * scale for scale in data[: batches // units]])}
    with folder() as path:
        entrants = {
            "harvest": lambda: len(tapax.harvest(fn, data, path / "acts", "h", units=units)),
            "safetensors": lambda: save_shards(path / "raw", shard, units),
        }

        def clear() -> None:
            # The time to write depends on what the machine has written and removed before, by a
            # factor of two. So equal writes come before each entrant.
            for name in ("acts", "raw"):
                shutil.rmtree(path / name, ignore_errors=True)
            save_shards(path / "before", shard, units)
            shutil.rmtree(path / "before")
            os.sync()

        times = race(entrants, rounds, warmup=1, before=clear)
    what = f"harvest to disk over raw safetensors, {batches * table.nbytes / MIB:.0f} MiB"
    return [Result.timed("dataset", what, times, "harvest", "safetensors", 1 / 0.9)]


def save_shards(to: Path, arrays: dict[str, np.ndarray], count: int) -> None:
    """Write a shard `count` times with safetensors and the threads of a harvest; sync each."""
    from safetensors.numpy import save_file

    from tapax.data._writer_threads import writer_count

    to.mkdir()

    def save(number: int) -> None:
        path = to / f"{number}.safetensors"
        save_file(arrays, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    with ThreadPoolExecutor(writer_count()) as threads:
        list(threads.map(save, range(count)))


def make_dataset(to: Path, rows: int, width: int, dtype: Any, units: int = 8) -> tapax.Activations:
    """Harvest a dataset of random numbers."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(4096, width)), dtype)
    data = np.arange(rows, dtype=np.int32).reshape(-1, 4096) * 7919 % 4096
    return tapax.harvest(functools.partial(looked_up, table), data, to, "h", units=units)


def read(rounds: int) -> list[Result]:
    """Compare random rows with a bare memory map, and shuffled batches with sequential ones."""
    with folder() as path:
        acts = make_dataset(path / "acts", 196_608, 1024, jnp.bfloat16)
        maps, ends = _memory_maps(acts)
        rng = np.random.default_rng(0)
        chosen = itertools.cycle([np.sort(rng.integers(len(acts), size=4096)) for _ in range(8)])

        def mapped() -> np.ndarray:
            numbers = next(chosen)
            cuts = np.searchsorted(numbers, ends)
            parts = np.split(numbers, cuts[:-1])
            starts = [0, *ends[:-1]]
            return np.concatenate(
                [x[part - start] for x, part, start in zip(maps, parts, starts, strict=True)]
            )

        numbers = np.sort(rng.integers(len(acts), size=4096))
        chosen = itertools.chain([numbers], chosen)
        assert (mapped() == np.asarray(acts["h"][numbers]).view(np.uint16)).all()
        rows = race(
            {"tapax": lambda: acts["h"][next(chosen)], "memmap": mapped}, rounds, calls=4, warmup=8
        )

        def first_pass(seed: int | None) -> Any:
            """Read the dataset as a new process does, which compares all checksums."""
            return _last(tapax.Activations(path / "acts").batches(4096, seed=seed, sites="h"))

        passes = race(
            {
                "shuffled": lambda: _last(acts.batches(4096, seed=0, sites="h")),
                "sequential": lambda: _last(acts.batches(4096, sites="h")),
                "first shuffled": lambda: first_pass(0),
                "first sequential": lambda: first_pass(None),
            },
            max(rounds // 2, 2),
            warmup=1,
        )
    return [
        Result.timed(
            "dataset", "4096 random rows over a memory map", rows, "tapax", "memmap", 1 / 0.8
        ),
        Result.timed(
            "dataset",
            "shuffled batches over sequential, first pass",
            passes,
            "first shuffled",
            "first sequential",
            1 / 0.7,
        ),
        Result.timed(
            "dataset",
            "shuffled batches over sequential, later passes",
            passes,
            "shuffled",
            "sequential",
            1 / 0.7,
        ),
    ]


def _memory_maps(acts: tapax.Activations) -> tuple[list[np.ndarray], np.ndarray]:
    """Map the rows of `h` in each shard as 16-bit integers, by the header of safetensors alone."""
    import json

    maps = []
    for path in sorted((Path(acts.path) / "shards").glob("*.safetensors")):
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            start, stop = json.loads(file.read(length))["rows/h"]["data_offsets"]
        data = np.memmap(path, np.uint8, "r")[8 + length + start : 8 + length + stop]
        maps.append(np.asarray(data).view(np.uint16).reshape(-1, *acts["h"].shape[1:]))
    return maps, np.cumsum([len(x) for x in maps])


def _last(batches: Iterator[Any]) -> Any:
    for batch in batches:
        last = batch
    return jax.block_until_ready(last)


def workers(rounds: int) -> list[Result]:
    """Compare two workers with one, each on one core.

    If other programs use the cores, the processor time of the busiest worker still tells whether
    the workers divide the work evenly and do nothing twice.
    """
    names = ("one", "two", "one, processor", "two, processor")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, count in (("one", 1), ("two", 2)):
            with folder() as path:
                seconds, processor = _time_workers(count, path)
            times[name].append(seconds)
            times[f"{name}, processor"].append(processor)
    return [
        Result.timed("dataset", "two workers over one", times, "two", "one", 1 / 1.7),
        Result.timed(
            "dataset",
            "two workers over one, processor time of the busiest",
            times,
            "two, processor",
            "one, processor",
            1 / 1.7,
        ),
    ]


def _time_workers(count: int, path: Path) -> tuple[float, float]:
    """Return the seconds from when all workers have compiled until the dataset is complete.

    The second number is the processor time that the busiest worker used meanwhile.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.datasets", str(path), str(count)]
    running = [
        subprocess.Popen([*command, str(index)], env=environment, stdout=subprocess.PIPE)
        for index in range(count)
    ]
    _read_lines(running)
    start = time.perf_counter()
    (path / "go").touch()
    processor = max(float(line) for line in _read_lines(running))
    seconds = time.perf_counter() - start
    for process in running:
        process.wait()
    return seconds, processor


def _read_lines(running: Sequence[subprocess.Popen[bytes]]) -> list[bytes]:
    """Wait until every process has printed a line."""
    return [process.stdout.readline() for process in running if process.stdout is not None]


def _be_worker(path: Path, count: int, index: int) -> None:
    """Compile on a separate core, report, wait for the other workers, and harvest."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})  # before XLA makes its threads

    @jax.jit  # so that the second harvest reuses the program that the first has compiled
    def busy(weights: jax.Array, x: jax.Array) -> jax.Array:
        return tapax.sow(jax.lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ weights), x), "h")

    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(512, 512)) / 23, jnp.float32)
    data = rng.normal(size=(96, 256, 512)).astype(np.float32)
    fn = functools.partial(busy, weights)
    tapax.harvest(fn, data[:1], path / f"warm-{index}", "h", worker=(0, 1))
    print("ready", flush=True)
    while not (path / "go").exists():
        time.sleep(0.001)
    start = time.process_time()
    tapax.harvest(fn, data, path / "acts", "h", units=48, worker=(index, count))
    print(time.process_time() - start, flush=True)


class TimedBatches(Sequence[np.ndarray]):
    """Batches, with the time at which each was last read."""

    def __init__(self, batches: list[np.ndarray]):
        self._batches = batches
        self.seconds = [0.0] * len(batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: Any) -> Any:
        self.seconds[number] = time.perf_counter()
        return self._batches[number]


def harvested(cfg: Config, rounds: int) -> list[Result]:
    """Compare harvesting a GPT on the GPU, to memory and to disk, with the plain forward pass.

    The time of a batch is that of a harvest that runs already: it counts from the batch at which as
    many shards are in memory as ever will be, so that compiling and new memory do not count.
    """
    params, tokens = cfg.arguments()
    loss = unrolled(cfg, tapax)  # type: ignore[arg-type]
    plain = jax.jit(loss)
    layers = sorted({int(n) for n in np.linspace(0, cfg.layers - 1, SITES)})
    values = [f"block{n}/out" for n in layers]
    first, last = 24, 63
    data = [np.roll(np.asarray(tokens), n, axis=0) for n in range(last + 1)]
    batch_bytes = cfg.batch * cfg.length * cfg.width * 2 * len(values)

    def run(to: Path) -> float:
        fn = functools.partial(loss, params)
        batches = TimedBatches(data)
        tapax.harvest(fn, batches, to, values, shard_bytes=2 * batch_bytes)
        return (batches.seconds[last] - batches.seconds[first]) / (last - first)

    def forward() -> float:
        start = time.perf_counter()
        for batch in data[first:last]:
            out = plain(params, batch)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / (last - first)

    times: dict[str, list[float]] = {"forward": [], "memory": [], "disk": [], "raw": []}
    with numbered("/dev/shm") as memory, numbered() as disk:
        for turn in range(-1, rounds):
            found = {
                "forward": forward(),
                "memory": run(next(memory)),
                "disk": run(next(disk)),
                "raw": _write_raw(next(disk), batch_bytes, last - first + 1) / (last - first + 1),
            }
            if turn >= 0:
                for name, seconds in found.items():
                    times[name].append(seconds)
    times["bound"] = [max(pair) for pair in zip(times["forward"], times["raw"], strict=True)]
    what = f"{len(values)} sites of a GPT, {batch_bytes / MIB:.0f} MiB a batch"
    return [
        Result.timed(
            "dataset", f"{what}, to memory over forward", times, "memory", "forward", 1.10
        ),
        Result.timed(
            "dataset", f"{what}, to disk over forward or disk", times, "disk", "bound", 1 / 0.9
        ),
    ]


def _write_raw(to: Path, batch_bytes: int, count: int) -> float:
    """Return the seconds to write the same bytes with safetensors and the threads of a harvest."""
    array = np.random.default_rng(0).integers(0, 2**16, batch_bytes, np.uint16)
    start = time.perf_counter()
    save_shards(to, {"h": array}, count // 2)
    return time.perf_counter() - start


def trained(cfg: Config, rounds: int) -> list[Result]:
    """Compare training a top-k autoencoder from the dataset with training from device memory."""
    rows, size = 128 * 4096, 4096
    latents, active = 8 * cfg.width, 32
    keys = jax.random.split(jax.random.key(0), 2)
    start = {
        "encoder": jax.random.normal(keys[0], (cfg.width, latents), jnp.float32) / cfg.width**0.5,
        "decoder": jax.random.normal(keys[1], (latents, cfg.width), jnp.float32) / latents**0.5,
    }

    @jax.jit
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            scores = jax.nn.relu(x @ params["encoder"].astype(x.dtype))
            least = jax.lax.top_k(scores, active)[0][:, -1:]
            kept = jnp.where(scores >= least, scores, 0)
            error = kept @ params["decoder"].astype(x.dtype) - x
            return jnp.mean(jnp.square(error.astype(jnp.float32)))

        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))

    @jax.jit
    def pick(data: jax.Array, key: jax.Array) -> jax.Array:
        return data[jax.random.randint(key, (size,), 0, len(data))]

    def learn(batches: Sequence[jax.Array] | Iterator[jax.Array]) -> Any:
        params = start
        for x in batches:
            params = step(params, x)
        return jax.block_until_ready(params)

    with folder() as path:
        acts = make_dataset(path / "acts", rows, cfg.width, jnp.bfloat16, units=16)
        data = jnp.asarray(acts["h"][:])
        all_keys = list(jax.random.split(jax.random.key(1), rows // size))
        entrants: dict[str, Callable[[], Any]] = {
            "disk": lambda: learn(b["h"] for b in acts.batches(size, seed=0, sites="h")),
            "memory": lambda: learn(pick(data, key) for key in all_keys),
        }
        times = race(entrants, rounds, warmup=1)
    what = f"an autoencoder of {latents} latents from disk over from device memory"
    rate = rows * cfg.width * 2 / statistics.median(times["disk"]) / 1e9
    return [Result.timed("dataset", f"{what} ({rate:.1f} GB/s)", times, "disk", "memory", 1 / 0.9)]


if __name__ == "__main__":
    _be_worker(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
