"""Harvests by processes of `jax.distributed`, compared with NumPy and with one process."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tapax
from tests.models import harvested

pytestmark = pytest.mark.once


def run_processes(count, folder):
    """Run a process for each of `count` hosts with two devices; raise if one fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2",
    }
    outputs = [folder / f"output-{i}.txt" for i in range(count)]
    processes = []
    for i, output in enumerate(outputs):
        arguments = [str(i), str(count), str(port), str(folder)]
        with output.open("w") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.models.harvesting_processes", *arguments],
                    cwd=Path(__file__).parents[2],
                    env=environment,
                    stdout=file,
                    stderr=file,
                )
            )
    end = time.monotonic() + 300
    while time.monotonic() < end and not any(process.poll() for process in processes):
        if all(process.poll() == 0 for process in processes):
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output.read_text()
        assert "done" in output.read_text().splitlines()


def check_rows(acts, batches, keep=lambda tokens: np.ones(tokens.shape, bool)):
    """Compare all rows with NumPy's; every row must be present exactly once."""
    places = [acts[name][:].tolist() for name in ("batch", "example", "position")]
    found = list(zip(*places, strict=True))
    expected = [
        (number, *place)
        for number, tokens in enumerate(batches)
        for place in np.argwhere(keep(tokens)).tolist()
    ]
    assert sorted(found) == sorted(expected)
    tokens = np.array([batches[batch][example, place] for batch, example, place in found])
    assert (acts["token"][:] == tokens).all()
    for name, compute in (("net/embed", harvested.embed), ("net/hidden", harvested.hidden)):
        rows = compute(tokens)
        assert (acts[name][:] == rows).all()
        assert acts.stats[name].rows == len(rows)
        np.testing.assert_allclose(acts.stats[name].mean, rows.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(acts.stats[name].var, rows.var(0), rtol=1e-5)
    assert acts.verify().is_whole


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.many)])
def test_processes_write_each_row_of_a_sharded_model_once(tmp_path, count):
    run_processes(count, tmp_path)
    spanning = harvested.make_batches(6, (4, 4))[:-1]
    local = harvested.make_batches(4, (3, 3))
    sharded = tapax.open(tmp_path / "sharded")
    check_rows(sharded, spanning)
    shards = sorted((tmp_path / "sharded" / "shards").glob("*.safetensors"))
    assert len(shards) == 3 * count  # each process writes a shard of each unit
    rows = json.loads((tmp_path / "sharded" / "index.json").read_text())["rows"]
    assert set(rows[:count]) == {2 * 16 // count}  # equal parts of two batches
    check_rows(tapax.open(tmp_path / "kept"), spanning, keep=lambda tokens: tokens % 2 == 0)
    check_rows(tapax.open(tmp_path / "replicated"), local)
    check_rows(tapax.open(tmp_path / "apart"), local)
    check_rows(tapax.open(tmp_path / "stream"), local)
    harvested.harvest(tmp_path / "alone")
    workers = harvested.read_files(tmp_path / "workers")
    assert workers == harvested.read_files(tmp_path / "alone")
