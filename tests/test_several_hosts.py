"""Two processes with two devices each, as on two hosts."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tapax


@pytest.mark.once
def test_every_public_function_runs_on_two_processes(tmp_path):
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
    outputs = [tmp_path / f"output-{i}.txt" for i in range(2)]
    processes = []
    for i, output in enumerate(outputs):
        command = [sys.executable, "-m", "tests.models.two_processes", str(i), str(port), tmp_path]
        with output.open("w") as file:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=Path(__file__).parents[1],
                    env=environment,
                    stdout=file,
                    stderr=file,
                )
            )
    end = time.monotonic() + 900
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
    log = (tmp_path / "run.jsonl").read_text()
    assert [int(step) for step in re.findall(r'"step": (\d+), "record"', log)] == [0, 2, 4, 6, 8]
    assert tapax.open(tmp_path / "run.jsonl").alerts[0].site == "h"
