"""Harvest and read a dataset of many gigabytes, and report the memory of the process.

`python -m tests.models.large_dataset harvest FOLDER GIGABYTES` harvests, and `read` in place of
`harvest` reads the dataset in shuffled order. Each prints a line of JSON: the bytes of the dataset,
the seconds, and the peak memory. Anonymous memory is what the process allocates. Resident memory
adds the pages of mapped shards, which the operating system may drop at any time.

The two are separate processes because the C library keeps a part of the memory that a harvest has
freed, as much as `tapax.data._free_memory` lets it.
"""

import functools
import json
import sys
import threading
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import tapax

ROWS, WIDTH = 4096, 1024


def scaled(table, scale):
    """Multiply a table by the batch: rows of 4 KiB, almost without computation."""
    return tapax.sow(table * scale, "h")


class Scales(Sequence):
    """Batches that are made when they are read."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, number):
        return np.full((1, 1), 1 + number % 1000, np.float32)


class PeakMemory(threading.Thread):
    """A thread that watches the memory of this process until its block ends, in bytes."""

    def __init__(self):
        super().__init__(daemon=True)
        self.anonymous = self.resident = 0
        self._stopped = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self._stopped.set()
        self.join()

    def run(self):
        while not self._stopped.wait(0.02):
            with open("/proc/self/status") as file:
                found = dict(line.split(":", 1) for line in file)
            anonymous, resident = (
                1024 * int(found[name].split()[0]) for name in ("RssAnon", "VmRSS")
            )
            self.anonymous = max(self.anonymous, anonymous)
            self.resident = max(self.resident, resident)


def watched(run):
    """Run a function; return its result, the seconds, and the peak memory."""
    start = time.perf_counter()
    with PeakMemory() as peak:
        found = run()
    seconds = round(time.perf_counter() - start, 1)
    return found, {"seconds": seconds, "anonymous": peak.anonymous, "resident": peak.resident}


def harvest(folder, count):
    table = jax.random.normal(jax.random.key(0), (ROWS, WIDTH), jnp.float32)
    return tapax.harvest(functools.partial(scaled, table), Scales(count), folder, "h")


def read(folder, count):
    acts = tapax.open(folder)
    rows = sum(len(batch["h"]) for batch in acts.batches(ROWS, seed=0, sites="h"))
    assert rows == len(acts) == ROWS * count
    return acts


def main(stage, folder, gigabytes):
    count = int(gigabytes * 1e9) // (4 * ROWS * WIDTH)
    run = {"harvest": harvest, "read": read}[stage]
    acts, peak = watched(lambda: run(folder, count))
    print(json.dumps({"bytes": acts.nbytes, **peak}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
