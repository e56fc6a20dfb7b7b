"""Harvests by processes of `jax.distributed`, compared with NumPy and with one process."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tapax
from tapax.data._folder import DatasetFolder
from tests.models import harvested

pytestmark = pytest.mark.once


def start_processes(module, count, logs, *arguments):
    """Start a process for each of `count` hosts with two devices; write their output to `logs`."""
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
    processes = []
    for i in range(count):
        command = [sys.executable, "-m", module, str(i), str(count), str(port)]
        with (logs / f"output-{i}.txt").open("w") as file:
            processes.append(
                subprocess.Popen(
                    [*command, *map(str, arguments)],
                    cwd=Path(__file__).parents[2],
                    env=environment,
                    stdout=file,
                    stderr=file,
                )
            )
    return processes


def wait_for(processes, seconds):
    """Wait until all processes have succeeded or one has failed; then end the others."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not any(process.poll() for process in processes):
        if all(process.poll() == 0 for process in processes):
            break
        time.sleep(0.1)
    end_processes(processes)


def end_processes(processes):
    for process in processes:
        process.kill()
        process.wait()


def check_success(processes, logs):
    """Raise the output of a process that has failed."""
    for i, process in enumerate(processes):
        output = (logs / f"output-{i}.txt").read_text()
        assert process.returncode == 0, output
        assert "done" in output.splitlines()


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
    processes = start_processes("tests.models.harvesting_processes", count, tmp_path, tmp_path)
    wait_for(processes, 300)
    check_success(processes, tmp_path)
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


def harvest_together(folder, logs, units):
    """Start two processes that harvest one sharded model."""
    return start_processes("tests.models.harvested_together", 2, logs, folder, units)


def kill_while_they_write(processes, victim, folder, shards):
    """Kill one of the processes after the folder has got some more shards."""
    done = DatasetFolder(folder).units_done
    before, end = len(done()), time.monotonic() + 120
    while len(done()) < before + shards and time.monotonic() < end:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.001)
    processes[victim].send_signal(signal.SIGKILL)


def kill_and_resume(tmp_path, kills, units):
    """Kill one of two processes several times, and compare with an uninterrupted harvest."""
    expected, killed, chance = tmp_path / "expected", tmp_path / "killed", random.Random(0)
    processes = harvest_together(expected, tmp_path, units)
    wait_for(processes, 300)
    check_success(processes, tmp_path)
    whole = harvested.read_files(expected)
    for kill in range(kills):
        processes = harvest_together(killed, tmp_path, units)
        try:
            kill_while_they_write(processes, kill % 2, killed, chance.randrange(1, 8))
            survivor = processes[1 - kill % 2]
            survivor.wait(60)
            assert survivor.returncode != 0  # an error, or JAX ends the process
        finally:
            end_processes(processes)
        files = harvested.read_files(killed)
        assert len(files) < len(whole) and files.items() <= whole.items()
    processes = harvest_together(killed, tmp_path, units)
    wait_for(processes, 300)
    check_success(processes, tmp_path)
    assert harvested.read_files(killed) == whole


def test_a_process_that_is_killed_loses_nothing_of_a_sharded_harvest(tmp_path):
    kill_and_resume(tmp_path, kills=1, units=20)


@pytest.mark.many
def test_processes_that_are_killed_often_lose_nothing_of_a_sharded_harvest(tmp_path):
    kill_and_resume(tmp_path, kills=10, units=80)
