"""The files follow `docs/format.md`, for readers without tapax."""

import collections
import json
import math
import re
import subprocess
import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import tapax
from tapax.data._shard_format import BLOCK, block_checksums
from tapax.data._shuffle import shuffled, shuffled_at
from tapax.data._units import UnitPlan
from tests.models.harvested import embed, harvest, hidden, make_batches

TOKENS = np.concatenate([batch.ravel() for batch in make_batches()])
DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("acts")
    harvest(folder, dtype="bfloat16")
    return folder


def test_the_program_in_the_document_reads_a_dataset(folder, tmp_path):
    code = re.search(r"```\{code-cell\}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[1]
    script = tmp_path / "read.py"
    script.write_text(
        f"{code}\nimport sys\nfound = read_dataset(sys.argv[1])\n"
        "assert not {'jax', 'tapax', 'ml_dtypes', 'safetensors'} & set(sys.modules)\n"
        "np.savez(sys.argv[2], **{name.replace('/', '.'): x for name, x in found.items()})\n"
    )
    command = [sys.executable, str(script), str(folder), str(tmp_path / "found.npz")]
    subprocess.run(command, check=True)
    found = np.load(tmp_path / "found.npz")
    np.testing.assert_array_equal(found["token"], TOKENS)
    np.testing.assert_array_equal(found["net.embed"], embed(TOKENS))
    np.testing.assert_array_equal(found["net.hidden"], hidden(TOKENS))


def test_other_readers_of_safetensors_read_shards(folder):
    with safe_open(folder / "shards" / "unit-00000001.safetensors", "numpy") as file:
        assert file.get_tensor("rows/token").tolist() == TOKENS[20:40].tolist()
        assert file.get_tensor("rows/net/hidden").dtype == ml_dtypes.bfloat16
        mean = file.get_tensor("statistics/net/hidden/mean")
    np.testing.assert_allclose(mean, hidden(TOKENS[20:40]).mean(0), rtol=1e-6)


def test_the_manifest_says_what_the_document_says(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["configuration"]["batches"] == 7
    assert [array["name"] for array in manifest["arrays"]] == [
        "net/embed", "net/hidden", "batch", "example", "position", "token",
    ]  # fmt: skip
    assert manifest["arrays"][1]["dtype"] == "bfloat16"
    assert manifest["arrays"][1]["computed_dtype"] == "float32"
    assert manifest["versions"]["tapax"] == tapax.__version__
    index = json.loads((folder / "index.json").read_text())
    assert index == {"units": 4, "rows": [20, 20, 20, 5]}


def test_a_version_to_come_is_refused(folder, tmp_path):
    content = json.loads((folder / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**content, "version": 2}))
    with pytest.raises(RuntimeError, match="is of version 2 of the format"):
        tapax.open(tmp_path)


def test_checksums_of_blocks_do_not_depend_on_chunks():
    data = np.random.default_rng(0).integers(0, 256, 3 * BLOCK + 100, np.uint8).tobytes()
    expected = tuple(zlib.crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK))
    for size in (len(data), BLOCK, 100_000, 2 * BLOCK + 1):
        chunks = [memoryview(data)[i : i + size] for i in range(0, len(data), size)]
        used = []
        assert block_checksums(chunks, used.append) == block_checksums(chunks) == expected
        assert used == chunks
    assert block_checksums([]) == block_checksums([memoryview(b"")]) == ()


def mixed(x):
    """Hash with SplitMix64 in Python integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def hashed(x, key):
    """Hash a 32-bit integer in Python integers."""
    x = (x + key) % 2**32
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15) * 0xD35A2D97 % 2**32
    return x ^ x >> 15


def at_place(place, count, key):
    """Find the number at a place of a random order, in Python integers."""
    start = 0
    for part in key:
        start = mixed(start ^ mixed(part % 2**64))
    keys = [mixed((start + number) % 2**64) // 2**32 for number in range(12)]
    left = 1
    while left**2 < count:
        left += 1
    right = -(-count // left)
    first, second = divmod(place, right)
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        first = (first + hashed(second, even) * left // 2**32) % left
        second = (second + hashed(first, odd) * right // 2**32) % right
    found = first * right + second
    return found if found < count else at_place(found, count, key)


@pytest.mark.parametrize("key", [(0,), (1, 5), (-3,), (2**70, 1)])
@pytest.mark.parametrize("count", [1, 2, 3, 50, 64, 65])
def test_random_orders_are_those_of_the_network(key, count):
    found = shuffled(count, *key).tolist()
    assert found == [at_place(place, count, key) for place in range(count)]
    assert sorted(found) == list(range(count))
    some = np.arange(count)[::3]
    assert shuffled_at(some, count, *key).tolist() == found[::3]


def test_all_orders_of_a_few_numbers_are_about_equally_likely():
    for count, expected in ((3, 600), (4, 200), (5, 60)):
        keys = range(expected * math.factorial(count))
        seen = collections.Counter(tuple(shuffled(count, key)) for key in keys)
        assert len(seen) == math.factorial(count)
        # A chi-squared number, whose mean and half of whose variance is the degrees of freedom.
        found, freedom = sum((n - expected) ** 2 / expected for n in seen.values()), len(seen) - 1
        assert found < freedom + 3 * math.sqrt(2 * freedom)


def test_neighbours_in_a_random_order_are_independent():
    order = shuffled(100_000, 3)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


def test_the_hash_is_the_published_one():
    assert mixed(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("batches", [1, 7, 24])
@pytest.mark.parametrize("per_unit", [1, 4, 30])
@pytest.mark.parametrize("seed", [None, 5])
def test_units_have_every_batch_once(batches, per_unit, seed):
    plan = UnitPlan(batches, per_unit, seed)
    numbers = [number for unit in plan.units() for number in plan.batch_numbers(unit)]
    assert sorted(numbers) == list(range(batches))
