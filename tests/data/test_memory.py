"""The memory of a process does not grow with the dataset that it harvests or reads."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tapax.data._free_memory import KEPT
from tapax.data._writer_threads import writer_count

GIB = 2**30


def measure(folder, gigabytes):
    """Harvest and read, each in a new process; return the peak memory of each stage."""
    try:
        return {stage: run(stage, folder, gigabytes) for stage in ("harvest", "read")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(stage, folder, gigabytes):
    command = [sys.executable, "-m", "tests.models.large_dataset"]
    command += [stage, str(folder), str(gigabytes)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.many
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the memory in /proc")
def test_memory_does_not_grow_with_the_dataset(tmp_path):
    gigabytes = 20
    if shutil.disk_usage(tmp_path).free < 2e9 * gigabytes:
        pytest.skip(f"the disk has no room for {gigabytes} GB")
    small, large = (measure(tmp_path / str(size), size) for size in (4, gigabytes))
    assert large["read"]["anonymous"] < small["read"]["anonymous"] + GIB / 2, (small, large)
    # The shards that threads write, one that waits for a thread, and one that grows.
    shards = (writer_count() + 2) * 2**28
    for found in (small, large):
        assert found["harvest"]["anonymous"] < shards + KEPT + GIB / 2, (small, large)
    # Eleven shards of 256 MiB at most, if eight threads write; and 4 GiB of mapped shards.
    assert large["harvest"]["resident"] < 3.5 * GIB
    assert large["read"]["resident"] < 6 * GIB
