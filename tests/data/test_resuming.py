"""Harvests resume after kills, share work, and detect other configurations and bad folders."""

import contextlib
import errno
import os
import random
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax.data import _atomic_files, _shard_writer
from tapax.data._folder import DatasetFolder
from tapax.data._units import Worker
from tests.models.harvested import harvest, make_batches, read_files

BATCHES = make_batches()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the files of an uninterrupted harvest."""
    folder = tmp_path_factory.mktemp("whole")
    harvest(folder)
    return read_files(folder)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, whole, workers):
    for index in reversed(range(workers)):
        acts = harvest(tmp_path, (index, workers), take_over=False)
        assert acts.is_complete == (index == 0)
    assert read_files(tmp_path) == whole


def test_a_worker_does_what_others_have_left(tmp_path, whole):
    harvest(tmp_path, (1, 3), take_over=False)
    assert harvest(tmp_path, (0, 3)).is_complete
    assert read_files(tmp_path) == whole


def test_a_worker_leaves_a_unit_that_another_is_done_with(tmp_path, whole):
    class SlowBatches(list):
        """Batches that let another worker harvest everything while the second one is read."""

        def __getitem__(self, number):
            seen.append(number)
            if len(seen) == 3:  # the harvest reads the first to describe the dataset
                harvest(tmp_path, (1, 2))
            return super().__getitem__(number)

    seen = []
    acts = harvest(tmp_path, (0, 2), SlowBatches(make_batches()))
    assert acts.is_complete and seen == [0, 0, 1]
    assert read_files(tmp_path) == whole


def test_without_taking_over_a_worker_does_its_share_alone(tmp_path):
    acts = harvest(tmp_path, (1, 3), take_over=False)
    assert sorted(set(acts["batch"][:].tolist())) == [2, 3] and acts.progress == "1 of 4 units"
    with pytest.warns(UserWarning, match="not complete: 1 of 4 units"):
        tapax.open(tmp_path)


class FailingBatches(list):
    """Batches that raise for some indices."""

    def __init__(self, batches, bad):
        super().__init__(batches)
        self.bad = bad
        self.read = []

    def __getitem__(self, number):
        self.read.append(number)
        if number in self.bad:
            raise LookupError(f"batch {number} is on a disk that burned")
        return super().__getitem__(number)


def test_a_batch_that_raises_leaves_the_units_before_it(tmp_path, whole):
    batches = FailingBatches(BATCHES, {5})
    with pytest.raises(LookupError, match="burned") as caught:
        harvest(tmp_path, batches=batches)
    assert "stopped with 2 of 4 units done" in "".join(caught.value.__notes__)
    batches.bad, batches.read = set(), []
    harvest(tmp_path, batches=batches)
    assert batches.read == [0, 4, 5, 6]  # the first determines the configuration
    assert read_files(tmp_path) == whole


def test_an_interrupt_leaves_whole_units_alone(tmp_path, whole):
    class Interrupted(FailingBatches):
        def __getitem__(self, number):
            if number == 6:
                raise KeyboardInterrupt
            return list.__getitem__(self, number)

    with pytest.raises(KeyboardInterrupt):
        harvest(tmp_path, batches=Interrupted(BATCHES, ()))
    assert set(read_files(tmp_path)) < set(whole)
    assert not list(tmp_path.rglob("*.tmp"))
    harvest(tmp_path)
    assert read_files(tmp_path) == whole


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path, whole, monkeypatch):
    harvest(tmp_path, worker=(1, 2), take_over=False)
    for path in tmp_path.rglob("*"):
        os.utime(path, (2**32, 2**32))  # in the year 2106
    ticks = iter(range(10**9, 0, -1))
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(f"tapax.data._meter.time.{name}", lambda: float(next(ticks)))
    acts = harvest(tmp_path, worker=(0, 2))
    monkeypatch.undo()
    assert acts.is_complete and read_files(tmp_path) == whole


def test_a_harvest_that_is_done_reads_one_batch(tmp_path, whole):
    harvest(tmp_path)
    batches = FailingBatches(BATCHES, ())
    acts = harvest(tmp_path, batches=batches)
    assert batches.read == [0] and len(acts) == 65


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"dtype": "bfloat16"}, "`dtype` was None there and is 'bfloat16' here"),
        ({"values": "net/embed"}, "'net/hidden' is a value of type float32[4] there and missing"),
        ({"units": 2}, "which `shard_bytes` and `units` decide, was 2 there and is 4 here"),
        ({"seed": 1}, "`seed` was None there and is 1 here"),
        ({"rows": "examples"}, "`rows` was 'tokens' there and is 'examples' here"),
        ({"keep": lambda b: b > 0}, "the mask of `keep` in the first batch was None there and"),
        ({"beside": lambda b: {"x": b}}, "'x' is missing there and a column of type int32[] here"),
        ({"batches": BATCHES[:-1], "units": 3}, "the number of batches was 7 there and is 6 here"),
        ({"batches": [b % 3 for b in BATCHES]}, "the checksum of the first batch was"),
    ],
)
def test_another_configuration_is_refused_with_the_difference(tmp_path, whole, options, difference):
    harvest(tmp_path)
    with pytest.raises(ValueError, match=re.escape(difference)):
        harvest(tmp_path, **options)
    assert read_files(tmp_path) == whole


def test_other_weights_are_refused(tmp_path):
    def harvest_with(weights):
        return tapax.harvest(lambda x: tapax.sow(x @ weights, "h"), [np.ones((2, 4))], to=tmp_path)

    weights = jnp.arange(16.0).reshape(4, 4)
    harvest_with(weights)
    harvest_with(weights + 0)
    with pytest.raises(ValueError, match="the checksum of the function's weights was"):
        harvest_with(weights.T)


def test_two_processes_with_one_worker_number_are_refused(tmp_path):
    already = rf"process {os.getpid()} on .* already harvests into .* as worker 0 of 1"
    with DatasetFolder(tmp_path).lock(Worker(0, 1)), pytest.raises(RuntimeError, match=already):
        harvest(tmp_path)
    harvest(tmp_path)


def test_processes_that_share_a_number_become_different_workers(tmp_path, whole, monkeypatch):
    """Under Pathways every process has the number 0."""
    monkeypatch.setattr("jax.process_count", lambda: 3)
    lock, tried = DatasetFolder.lock, []

    def watched(folder, worker, process=None):
        tried.append(worker)
        return lock(folder, worker, process)

    locked = DatasetFolder(tmp_path)
    with locked.lock(Worker(0, 3)), locked.lock(Worker(1, 3)):
        monkeypatch.setattr(DatasetFolder, "lock", watched)
        harvest(tmp_path, None)
        monkeypatch.undo()
    assert tried == [Worker(0, 3), Worker(1, 3), Worker(2, 3)]
    monkeypatch.setattr("jax.process_count", lambda: 3)
    assert read_files(tmp_path) == whole
    with contextlib.ExitStack() as stack:
        for index in range(3):
            stack.enter_context(locked.lock(Worker(index, 3)))
        stack.enter_context(pytest.raises(RuntimeError, match=r"already harvests .* worker 2 of 3"))
        harvest(tmp_path, None)


def test_a_full_disk_stops_with_a_sentence_and_loses_nothing(tmp_path, whole, monkeypatch):
    written, lock = [], threading.Lock()

    def write(file, part):
        if file.tell() == 0:  # the header, which is written last
            with lock:
                if len(written) == 2:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written.append(file.name)
        _atomic_files.write_all(file, part)

    monkeypatch.setattr(_shard_writer, "write_all", write)
    with pytest.raises(OSError, match="cannot be written: No space left on device") as caught:
        harvest(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert len(DatasetFolder(tmp_path).units_done()) == 2
    harvest(tmp_path)
    assert read_files(tmp_path) == whole


def test_a_write_that_fails_halfway_leaves_no_file(tmp_path):
    def parts():
        yield b"a" * 100
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        _atomic_files.write_whole(tmp_path / "shard", parts(), "worker")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"The dataset '.*file/acts' cannot be written: Not a dir"):
        harvest(tmp_path / "file" / "acts")


def test_leftovers_of_a_killed_worker_are_removed(tmp_path, whole):
    (tmp_path / "shards").mkdir()
    left = tmp_path / "shards" / ".unit-00000001.safetensors.worker-0-of-1.abcd1234.tmp"
    left.write_bytes(b"half")
    harvest(tmp_path)
    assert not left.exists() and read_files(tmp_path) == whole


def test_a_shard_that_is_removed_is_harvested_again(tmp_path, whole):
    harvest(tmp_path)
    (tmp_path / "shards" / "unit-00000002.safetensors").unlink()
    harvest(tmp_path)
    assert read_files(tmp_path) == whole


def test_a_shard_that_is_cut_off_stops_the_index(tmp_path):
    harvest(tmp_path, (0, 2), take_over=False)
    path = tmp_path / "shards" / "unit-00000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(tapax.data.ShardError, match=r"unit-00000002.* is not complete"):
        harvest(tmp_path, (1, 2))


def start_harvest(folder, units, worker=(0, 1)):
    arguments = [str(folder), str(units), *map(str, worker)]
    command = [sys.executable, "-m", "tests.models.harvested", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def kill_while_it_writes(process, folder, delay):
    """Kill a process some time after it starts to write its next shard, unless it ends first."""
    shards = folder / "shards"
    before = set(os.listdir(shards)) if shards.exists() else set()
    while process.poll() is None:
        if shards.exists() and set(os.listdir(shards)) - before:
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.0005)
    process.communicate()


def kill_and_resume(folder, kills, units):
    """Kill harvests at random moments, finish the last, and compare with an uninterrupted one."""
    expected, killed, chance = folder / "expected", folder / "killed", random.Random(0)
    harvest(expected, batches=make_batches(2 * units), units=units)
    for kill in range(kills):
        process = start_harvest(killed, units)
        if kill % 5 == 4:  # at any moment, including the start
            time.sleep(chance.uniform(0, 3))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        else:
            kill_while_it_writes(process, killed, chance.uniform(0, 0.02))
        for name, content in read_files(killed).items():
            assert content == (expected / name).read_bytes()
    left = units - len(DatasetFolder(killed).units_done())
    process = start_harvest(killed, units)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert read_files(killed) == read_files(expected)
    return left


@pytest.mark.once
def test_processes_that_run_at_once_write_one_dataset(tmp_path):
    harvest(tmp_path / "expected", batches=make_batches(60), units=30)
    processes = [start_harvest(tmp_path / "shared", 30, (index, 3)) for index in range(3)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert read_files(tmp_path / "shared") == read_files(tmp_path / "expected")


@pytest.mark.once
def test_a_harvest_that_is_killed_loses_and_repeats_nothing(tmp_path):
    assert kill_and_resume(tmp_path, kills=4, units=80) > 0


@pytest.mark.many
def test_a_harvest_that_is_killed_a_hundred_times_loses_nothing(tmp_path):
    assert kill_and_resume(tmp_path, kills=100, units=6000) > 0


BATCH = [np.random.default_rng(i).normal(size=(4, 6, 8)).astype(np.float32) for i in range(4)]


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("traced function", {}, {"fn": lambda x: tapax.sow(jnp.tanh(x), "h")}),
        ("traced function", {}, {"fn": lambda x: tapax.sow(3.0 * x, "h")}),
        (
            "mask of `keep` in the first batch",
            {"keep": lambda x: x[..., 0] > 0},
            {"keep": lambda x: x[..., 0] < 0},
        ),
        (
            "columns of `beside` in the first batch",
            {"beside": lambda x: {"c": x[..., 0]}},
            {"beside": lambda x: {"c": x[..., 1]}},
        ),
    ],
    ids=["operation", "literal", "keep", "beside"],
)
def test_another_function_is_refused(tmp_path, what, first, second):
    options = {"fn": lambda x: tapax.sow(2.0 * x, "h"), "batches": BATCH, "to": tmp_path}
    tapax.harvest(**{**options, **first})
    tapax.harvest(**{**options, **first})
    with pytest.raises(ValueError, match=f"another dataset: the checksum of the {what} was"):
        tapax.harvest(**{**options, **second})


def test_a_function_has_one_checksum_in_all_processes(tmp_path):
    script = """
import sys, jax, jax.numpy as jnp, numpy as np, tapax
from flax import nnx
from jax.sharding import PartitionSpec as P

auto = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=auto)
net = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
gate = jax.custom_jvp(jnp.tanh)
gate.defjvps(lambda t, out, x: t * (1 - out**2))

@jax.shard_map(mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
def divided(x):
    return jax.lax.cond(x.sum() > 0, lambda x: gate(x), jax.nn.relu, x)

fn = lambda x: tapax.sow(jax.checkpoint(divided)(net(x)), "h")
acts = tapax.harvest(fn, [np.ones((4, 8), np.float32)], to=sys.argv[1])
print(acts.manifest.configuration["program"])
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    found = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", script, str(tmp_path / seed)]
        environment = {**os.environ, **flags, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


def test_a_mask_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="The mask of `keep` has the shape"):
        tapax.harvest(lambda x: tapax.sow(x, "h"), BATCH, to=tmp_path, keep=np.ones((4, 5), bool))
    mask = np.ones((4, 6), bool)
    assert tapax.harvest(lambda x: tapax.sow(x, "h"), BATCH, to=tmp_path, keep=mask).is_complete


def test_a_complete_dataset_has_no_files_of_killed_workers(tmp_path):
    folder = DatasetFolder(tmp_path)
    with folder.lock(Worker(1, 2)) as owner:
        folder.create(owner)
    left = tmp_path / "shards" / f".unit-00000001.safetensors.{owner}.0123abcd.tmp"
    left.write_bytes(b"half a shard")
    with folder.lock(Worker(2, 3)) as running:
        other = tmp_path / "shards" / f".unit-00000002.safetensors.{running}.0123abcd.tmp"
        other.write_bytes(b"a shard that is being written")
        harvest(tmp_path)
        assert not left.exists() and other.exists()
    hidden = {path.name for path in tmp_path.rglob(".*")}
    assert hidden == {other.name, f".{running}.lock"}


def test_a_process_syncs_few_files_at_once(tmp_path, monkeypatch):
    # Files that are all synced at once finish at once, and leave the disk without work.
    lock, now, most = threading.Lock(), 0, 0

    def fsync(descriptor):
        nonlocal now, most
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1

    monkeypatch.setattr(os, "fsync", fsync)
    with ThreadPoolExecutor(8) as threads:
        for number in range(16):
            threads.submit(_atomic_files.write_whole, tmp_path / str(number), [b"rows"], "test")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, range(16)))
    assert most == 2
