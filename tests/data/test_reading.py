"""Reading datasets by index, in batches and by other loaders, and detecting damage."""

import json
import os
import pickle
import shutil
import threading
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax.__main__ import main
from tapax.data._batch_order import BatchOrder
from tapax.data._mapped_shard import MappedShard
from tests.models.harvested import embed, harvest, hidden, make_batches

TOKENS = np.concatenate([batch.ravel() for batch in make_batches()])
ROWS = hidden(TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("acts")
    harvest(folder)
    return folder


@pytest.fixture
def acts(folder):
    return tapax.open(folder)


@pytest.fixture
def copied(folder, tmp_path):
    """Copy the dataset, so that a test may damage it."""
    return shutil.copytree(folder, tmp_path / "acts")


@pytest.mark.parametrize(
    "index",
    [
        0, -1, np.int64(7), slice(3, 9), slice(15, 45), slice(None), slice(40, 3, -7), slice(9, 3),
        slice(-5, None), [3, 17, 5], [64, 0, 0, -1], [], np.array([20, 21]), TOKENS % 2 == 0, ...,
        (slice(2, 30), 1), ([5, 2], slice(1, 3)), (3, 2), (..., 0), (slice(0, 4), None),
        (), ([5, 2], [1, 3]), ([5, 2], slice(None), None), (TOKENS % 2 == 0, 1),
    ],
    ids=str,
)  # fmt: skip
def test_indices_read_what_numpy_reads(acts, index):
    found, expected = acts["net/hidden"][index], ROWS[index]
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


def test_a_slice_in_one_shard_is_a_view_that_nobody_can_write(acts):
    rows = acts["net/hidden"][2:8]
    assert np.shares_memory(rows, acts["net/hidden"][0:9])
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 0


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (65, "so there is no row 65"),
        ([3, 65], "so there is no row 65"),
        ([1.5], "not by an array of type float64"),
        ([[1, 2]], "not by an array of type int64"),
        (np.ones(3, bool), r"needs the shape \[65\]"),
        (True, "cannot be indexed with True"),
    ],
)
def test_rows_that_do_not_exist_raise(acts, index, message):
    with pytest.raises(IndexError, match=message):
        acts["net/hidden"][index]


@pytest.mark.parametrize("numbers", [[5, 2, 5], [-1, 0, -3]])
def test_rows_are_taken_by_numbers_from_either_end(acts, numbers):
    array = acts["net/hidden"]
    np.testing.assert_array_equal(array.take(np.array(numbers)), ROWS[numbers])
    with pytest.raises(IndexError, match="so there is no row"):
        array.take(np.array([len(acts)]))


def test_jax_uses_the_rows_of_a_batch_on_a_cpu_without_a_copy(acts):
    rows = acts["net/hidden"].take(np.array([0, 3, 5]))
    assert rows.ctypes.data % 64 == 0
    assert jax.device_put(rows).unsafe_buffer_pointer() == rows.ctypes.data


def test_rows_of_everything_are_a_dict(acts):
    found = acts[[3, 17, 5]]
    assert list(found) == ["net/embed", "net/hidden", "batch", "example", "position", "token"]
    np.testing.assert_array_equal(found["net/embed"], embed(TOKENS[[3, 17, 5]]))
    assert acts[64]["token"] == TOKENS[64] and acts[10:12]["token"].tolist() == [*TOKENS[10:12]]


def test_names_that_do_not_exist_name_those_that_do(acts):
    with pytest.raises(KeyError, match="The nearest names are 'net/hidden'"):
        acts["net/hiden"]
    with pytest.raises(KeyError, match="'net/hidden'"):
        acts.stats["net/hiden"]
    assert "net/hidden" in acts and "net/hiden" not in acts


def test_a_dataset_prints_as_a_table(acts):
    text = repr(acts)
    assert "65 rows" in text and "4 of 4 units" in text and "float32[4]" in text
    assert "net" in acts._repr_html_()
    assert repr(acts["token"]) == "LazyArray('token', shape=(65,), dtype=int32)"


@pytest.mark.parametrize("seed", [None, 0])
def test_every_row_comes_once_in_batches(acts, seed):
    batches = list(acts.batches(10, seed=seed))
    assert [len(batch["token"]) for batch in batches] == [10] * 6 + [5]
    assert all(isinstance(x, jax.Array) for x in batches[0].values())
    numbers = np.concatenate([_row_numbers(batch) for batch in batches])
    assert sorted(numbers) == list(range(65))
    assert (numbers.tolist() == sorted(numbers)) == (seed is None)
    for batch in batches:
        np.testing.assert_array_equal(batch["net/hidden"], ROWS[_row_numbers(batch)])


def _row_numbers(batch):
    places = [np.asarray(batch[name]) for name in ("batch", "example", "position")]
    return places[0] * 10 + places[1] * 5 + places[2]


def test_batches_go_on_at_a_position(acts):
    whole = [_row_numbers(batch).tolist() for batch in acts.batches(8, seed=4)]
    reader = acts.batches(8, seed=4)
    first = [_row_numbers(next(reader)).tolist() for _ in range(3)]
    assert reader.position == 3 and len(reader) == 9
    rest = acts.batches(8, seed=4, start=reader.position)
    assert first + [_row_numbers(batch).tolist() for batch in rest] == whole


def test_the_order_of_a_seed_never_changes():
    order = BatchOrder([4, 4, 4, 3], size=4, seed=1, window=2)
    assert [order.rows(i).tolist() for i in range(4)] == ORDER


ORDER = [[0, 2, 3, 10], [1, 8, 9, 11], [5, 12, 13, 14], [4, 6, 7]]


def test_rows_of_a_window_are_mixed_and_windows_follow_one_another():
    counts = [100] * 12
    order = BatchOrder(counts, size=100, seed=7, window=4)
    shards = [set((order.rows(i) // 100).tolist()) for i in range(12)]
    assert all(len(set.union(*shards[i : i + 4])) == 4 for i in (0, 4, 8))
    assert min(map(len, shards)) >= 3
    other = BatchOrder(counts, size=100, seed=8, window=4)
    assert order.rows(0).tolist() != other.rows(0).tolist()


def test_sites_select_what_batches_hold(acts):
    batch = next(acts.batches(4, sites=["net/hid*", "token"]))
    assert list(batch) == ["net/hidden", "token"]
    with pytest.raises(tapax.SiteError, match="matches no site in this dataset"):
        acts.batches(4, sites="net/hiden")


def test_the_remainder_is_dropped_if_asked(acts):
    assert [len(b["token"]) for b in acts.batches(30, drop_remainder=True)] == [30, 30]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 30, "start": 4}, "`start` is 4, but the dataset has 3 batches of 30 rows"),
        ({"size": 30, "start": 3, "drop_remainder": True}, "`start` is 3, but .* 2 batches"),
        ({"size": 66, "drop_remainder": True}, "the dataset has 65 rows, and a batch 66"),
    ],
)
def test_batches_that_would_all_be_missing_are_refused(acts, options, message):
    with pytest.raises(ValueError, match=message):
        acts.batches(**options)


def test_a_reader_that_stopped_at_the_end_continues_with_nothing(acts):
    assert list(acts.batches(30, start=3)) == []


def test_comparisons_are_masks_of_rows(acts):
    mask = acts["token"] == 3
    np.testing.assert_array_equal(mask, TOKENS == 3)
    np.testing.assert_array_equal(acts["net/hidden"][mask], ROWS[TOKENS == 3])
    np.testing.assert_array_equal(acts["token"] != acts["position"], acts["position"][:] != TOKENS)


def test_batches_are_divided_over_a_mesh(acts, mesh):
    batches = list(acts.batches(16, seed=0, mesh=mesh, drop_remainder=True))
    assert len(batches) == 4
    for batch in batches:
        assert len(batch["net/hidden"].sharding.device_set) == 4
        assert batch["net/hidden"].addressable_shards[0].data.shape == (4, 4)
        np.testing.assert_array_equal(batch["net/hidden"], ROWS[_row_numbers(batch)])
    with pytest.raises(ValueError, match=r"The last batch of 1 rows .*drop_remainder=True"):
        acts.batches(16, mesh=mesh)
    with pytest.raises(ValueError, match=r"Batches of 6 rows .*another `size`"):
        acts.batches(6, mesh=mesh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "`size` takes an integer, 1 at least"),
        ({"size": 4, "start": -1}, "`start` takes an integer"),
        ({"size": 4, "mesh": 3}, "`mesh` takes a jax.sharding.Mesh"),
        ({"size": 4, "sharding": 3}, "`sharding` takes a jax.sharding.Sharding"),
        ({"size": 4, "seed": 1.5}, "`seed` takes an integer"),
    ],
)
def test_bad_arguments_of_batches_are_refused(acts, options, message):
    with pytest.raises(TypeError, match=message):
        acts.batches(**options)


def test_integers_that_jax_would_cut_off_raise(tmp_path):
    big = harvest(tmp_path, beside=lambda b: {"hash": b.astype(np.int64) + 2**40})
    if jnp.asarray(np.int64(0)).dtype == np.int64:
        assert next(big.batches(4))["hash"][0] > 2**39
        return
    with pytest.raises(OverflowError, match="'hash' has integers that need 64 bits"):
        next(big.batches(4))
    assert next(big.batches(4, sites="net/*"))["net/embed"].shape == (4, 4)


def test_numbers_that_jax_would_make_infinite_raise(tmp_path):
    wide = harvest(tmp_path, beside=lambda b: {"p": np.where(b > 3, 1e300, np.inf)})
    if jnp.asarray(np.float64(0)).dtype == np.float64:
        assert jnp.isfinite(next(wide.batches(65))["p"]).any()
        return
    with pytest.raises(OverflowError, match="'p' has numbers that need 64 bits"):
        next(wide.batches(65))


def test_a_reader_that_is_dropped_leaves_no_threads(acts):
    reader = acts.batches(4, seed=0)
    next(reader)
    threads = reader._threads._threads
    assert threads
    del reader
    for thread in threads:
        thread.join(10)
        assert thread not in threading.enumerate()


def test_a_source_for_grain_gives_rows_and_can_be_pickled(acts):
    source = pickle.loads(pickle.dumps(acts.source("net/hidden")))
    assert len(source) == 65
    np.testing.assert_array_equal(source[7], ROWS[7])
    assert acts.source()[7]["token"] == TOKENS[7]
    with pytest.raises(KeyError, match="nearest names"):
        acts.source("net/hiden")


@pytest.mark.parametrize("select", [lambda a: a, lambda a: a.source(), lambda a: a["token"]])
def test_a_dataset_can_be_unpickled_in_another_folder(folder, tmp_path, monkeypatch, select):
    monkeypatch.chdir(folder.parent)
    pickled = pickle.dumps(select(tapax.open(folder.name)))
    monkeypatch.chdir(tmp_path)
    found = pickle.loads(pickled)
    last = found[64]
    assert (last["token"] if isinstance(last, dict) else last) == TOKENS[64]
    assert len(found) == 65


def test_grain_shuffles_and_batches_a_source(acts):
    grain = pytest.importorskip("grain")
    batches = grain.MapDataset.source(acts.source("net/hidden")).shuffle(seed=0).batch(13)
    found = np.concatenate([np.asarray(batch) for batch in batches])
    assert sorted(map(tuple, found)) == sorted(map(tuple, ROWS))


def test_a_dataset_of_torch_shares_the_mapped_memory(tmp_path):
    torch = pytest.importorskip("torch")
    acts = harvest(tmp_path, dtype="bfloat16")
    data = acts.torch(["net/hidden", "token"])
    assert len(data) == 65 and data[3]["net/hidden"].dtype is torch.bfloat16
    assert data[3]["net/hidden"].data_ptr() == data[3]["net/hidden"].data_ptr()
    loader = torch.utils.data.DataLoader(data, batch_size=13)
    found = torch.cat([batch["net/hidden"].float() for batch in loader]).numpy()
    np.testing.assert_array_equal(found, ROWS)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "lance"])
def test_exports_hold_every_row(tmp_path, suffix, dtype):
    library = pytest.importorskip("lance" if suffix == "lance" else "pyarrow")
    acts = harvest(tmp_path / "acts", dtype=dtype)
    path = tmp_path / f"acts.{suffix}"
    acts.export(path, sites=["net/hidden", "token"])
    if suffix == "parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
    elif suffix == "lance":
        table = library.dataset(str(path)).to_table()
    else:
        table = library.ipc.open_file(str(path)).read_all()
    assert table.column_names == ["net/hidden", "token"]
    np.testing.assert_array_equal(np.array(table["net/hidden"].to_pylist(), np.float32), ROWS)
    assert table["token"].to_pylist() == TOKENS.tolist()
    with pytest.raises(FileExistsError, match="is there already"):
        acts.export(path)
    with pytest.raises(ValueError, match=r"exported to .parquet, .arrow, .lance"):
        acts.export(tmp_path / "acts.csv")
    assert sorted(os.listdir(tmp_path)) == ["acts", f"acts.{suffix}"]


def test_exports_that_cannot_be_written_say_why(tmp_path):
    pytest.importorskip("pyarrow")

    def fn(x):
        return tapax.sow(x, "h"), tapax.sow(x[:, :0], "empty")

    acts = tapax.harvest(fn, [np.ones((2, 3), np.float32)], to=tmp_path / "acts")
    with pytest.raises(ValueError, match=r"The rows of 'empty' have the shape \[0\]"):
        acts.export(tmp_path / "acts.parquet")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"The dataset cannot be exported to .*Choose a path"):
        acts.export(tmp_path / "file" / "acts.parquet", sites="h")
    acts.export(tmp_path / "acts.parquet", sites="h")


def damage(path, place, byte=None):
    content = bytearray(path.read_bytes())
    content[place] = content[place] ^ 0xFF if byte is None else byte
    path.write_bytes(bytes(content))


def test_an_altered_row_raises_and_is_named(copied):
    path = copied / "shards" / "unit-00000001.safetensors"
    damage(path, -3)  # in the last array
    acts = tapax.open(copied)
    found = acts.verify()
    assert not found.is_whole and len(found.faults) == 1
    assert "unit-00000001.safetensors" in found.faults[0] and "was altered" in found.faults[0]
    errors = []
    for name in (*acts.sites, *acts.columns):
        for index in (slice(None), [20, 40], 25):
            try:
                acts[name][index]
            except tapax.data.ShardError as error:
                errors.append((name, str(error)))
    assert len({name for name, _ in errors}) == 1 and "do not have the checksum" in errors[0][1]
    with pytest.raises(tapax.data.ShardError):
        list(acts.batches(8, seed=0))


@pytest.mark.parametrize("place", range(0, 4000, 97))
def test_no_altered_byte_goes_unnoticed(copied, place):
    path = copied / "shards" / "unit-00000000.safetensors"
    size = path.stat().st_size
    damage(path, place % size)
    acts = tapax.open(copied)
    assert not acts.verify().is_whole
    with pytest.raises(tapax.data.ShardError):
        [acts.stats, *(acts[name][:] for name in (*acts.sites, *acts.columns))]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"net/hidden":{"dtype":"F32"', b'"net/hidden":{"dtype":"I32"'),
        (b'"rows/net/hidden":{"dtype"', b'"rows/net/hiddem":{"dtype"'),
    ],
    ids=["dtype", "name"],
)
def test_a_header_altered_for_other_readers_is_noticed(copied, before, after):
    path = copied / "shards" / "unit-00000001.safetensors"
    content = path.read_bytes()
    before, after = (x.replace(b'"net/', b'"rows/net/') for x in (before, after))
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, after))
    acts = tapax.open(copied)
    assert "header of the shard" in acts.verify().faults[0]
    with pytest.raises(tapax.data.ShardError, match="was altered"):
        acts["net/hidden"][20]


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_a_truncated_shard_raises_and_is_named(copied, length):
    path = copied / "shards" / "unit-00000002.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    acts = tapax.open(copied)
    assert "unit-00000002" in acts.verify().faults[0]
    with pytest.raises(tapax.data.ShardError, match="unit-00000002"):
        acts["net/hidden"][:]
    np.testing.assert_array_equal(acts["net/hidden"][:10], ROWS[:10])


def test_a_missing_shard_raises_and_is_named(copied):
    (copied / "shards" / "unit-00000003.safetensors").unlink()
    acts = tapax.open(copied)
    assert acts.verify().faults == (
        f"The shard {str(copied / 'shards' / 'unit-00000003.safetensors')!r} is missing.",
    )
    with pytest.raises(tapax.data.ShardError, match=r"unit-00000003.* is missing"):
        acts["token"][:]


def test_shards_of_another_dataset_or_unit_are_refused(copied, tmp_path):
    harvest(tmp_path / "other", dtype="bfloat16")
    shards = copied / "shards"
    content = (shards / "unit-00000000.safetensors").read_bytes()
    (shards / "unit-00000001.safetensors").write_bytes(content)
    assert "contains unit 0 instead" in tapax.open(copied).verify().faults[0]
    other = (tmp_path / "other" / "shards" / "unit-00000001.safetensors").read_bytes()
    (shards / "unit-00000001.safetensors").write_bytes(other)
    with pytest.raises(tapax.data.ShardError, match="belongs to another dataset"):
        tapax.open(copied)["token"][:]


@pytest.mark.parametrize("name", ["manifest.json", "index.json"])
def test_an_altered_manifest_or_index_is_refused(copied, name):
    path = copied / name
    path.write_bytes(path.read_bytes().replace(b"4", b"5", 1))
    with pytest.raises((ValueError, RuntimeError)):
        tapax.open(copied)["net/hidden"][:]


def test_a_path_that_is_not_a_dataset_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        tapax.open(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no dataset of activations"):
        tapax.Activations(tmp_path)


def test_the_command_describes_and_checks(copied, capsys):
    assert main(["data", str(copied)]) == 0
    assert "65 rows" in capsys.readouterr().out
    assert main(["data", "verify", str(copied)]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    damage(copied / "shards" / "unit-00000001.safetensors", -3)
    assert main(["data", "verify", str(copied)]) == 1
    assert "1 faults" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["data", str(copied / "shards")])
    assert caught.value.code == 2 and "no dataset" in capsys.readouterr().err


def test_many_shards_are_read_though_few_stay_mapped(acts, monkeypatch):
    monkeypatch.setattr("tapax.data._shard_set._MAPPED", 2)
    np.testing.assert_array_equal(acts["net/hidden"][:], ROWS)
    assert len(acts._shards._mapped) == 2


def test_memory_of_shards_that_are_not_used_is_released(acts, monkeypatch):
    released = []

    def release(shard):
        released.append(shard.path.name)

    monkeypatch.setattr("tapax.data._shard_set._RESIDENT", 1)
    monkeypatch.setattr(MappedShard, "release_pages", release)
    np.testing.assert_array_equal(acts["net/hidden"][:], ROWS)
    np.testing.assert_array_equal(acts["net/hidden"][:25], ROWS[:25])
    assert [int(name[5:13]) for name in released] == [0, 1, 2, 3, 0]
    monkeypatch.undo()
    acts._shards.shard(0).release_pages()
    np.testing.assert_array_equal(acts["net/hidden"][:25], ROWS[:25])


def test_rows_longer_than_a_block_are_checked_to_their_end(tmp_path):
    batch = np.arange(3 * 200_000, dtype=np.float32).reshape(3, 200_000)  # 800,000 bytes a row
    acts = tapax.harvest(lambda x: tapax.sow(x + 1, "h"), [batch], to=tmp_path, rows="examples")
    np.testing.assert_array_equal(acts["h"][[2, 0]], batch[[2, 0]] + 1)
    [path] = (tmp_path / "shards").iterdir()
    first = path.read_bytes().index(np.float32(200_001).tobytes())  # of the middle row
    damage(path, first + 700_000)
    damaged = tapax.open(tmp_path)
    np.testing.assert_array_equal(damaged["h"][[0]], batch[[0]] + 1)
    for index in (1, [0, 1], slice(0, 2)):
        with pytest.raises(tapax.data.ShardError, match="was altered"):
            damaged["h"][index]


def values_of(batches):
    """Read all batches of one row; an exception is its name."""
    found = []
    while True:
        try:
            found.append(int(next(batches)["batch"][0]))
        except StopIteration:
            return found
        except (tapax.data.ShardError, KeyboardInterrupt) as error:
            found.append(type(error).__name__)
            if len(found) > 20:
                return found


@pytest.fixture
def single_rows(tmp_path):
    batches = [np.full((1, 2), i, np.float32) for i in range(8)]
    return tapax.harvest(lambda x: tapax.sow(x, "h"), batches, to=tmp_path / "rows", units=8)


def test_an_interrupted_read_loses_and_repeats_no_batch(single_rows, monkeypatch):
    result, calls = Future.result, []

    def interrupted(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return result(self, *args, **kwargs)

    monkeypatch.setattr(Future, "result", interrupted)
    batches = single_rows.batches(1)
    assert values_of(batches) == [0, 1, 2, "KeyboardInterrupt", 3, 4, 5, 6, 7]


def test_a_damaged_batch_is_read_again_once_it_is_mended(single_rows):
    path = os.path.join(single_rows.path, "shards", "unit-00000003.safetensors")
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "r+b") as file:
        file.truncate(len(content) - 1)
    batches = tapax.open(single_rows.path).batches(1)
    assert [int(next(batches)["batch"][0]) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(tapax.data.ShardError):
            next(batches)
        assert batches.position == 3
    with open(path, "wb") as file:
        file.write(content)
    assert values_of(batches) == [3, 4, 5, 6, 7]


def test_a_shard_in_the_place_of_another_is_not_read(single_rows):
    names = [f"unit-0000000{i}.safetensors" for i in (2, 1)]
    shutil.copy(*(os.path.join(single_rows.path, "shards", name) for name in names))
    with pytest.raises(tapax.data.ShardError, match="contains unit 2 instead of the unit of its"):
        tapax.open(single_rows.path)["batch"][:]


@pytest.mark.parametrize("rows", [[1] * 7, [1] * 9, [1] * 7 + [-1], [1] * 7 + [1.0]])
def test_an_index_that_does_not_fit_is_refused(single_rows, rows):
    path = os.path.join(single_rows.path, "index.json")
    with open(path, "w") as file:
        json.dump({"units": len(rows), "rows": rows}, file)
    with pytest.raises(ValueError, match="was altered"):
        tapax.open(single_rows.path)


def test_a_sharding_with_more_axes_than_a_column_is_refused(acts, mesh):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", None))
    with pytest.raises(
        ValueError, match=r"cannot be divided over the devices: '(batch|example|p|t)"
    ):
        acts.batches(4, sharding=sharding, drop_remainder=True)
    found = next(acts.batches(4, sharding=sharding, sites="net/embed", drop_remainder=True))
    assert found["net/embed"].shape == (4, 4)


def test_batches_divided_along_the_width(acts):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
    (first, *_) = acts.batches(5, sites="net/hidden", sharding=sharding)
    assert first["net/hidden"].sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(first["net/hidden"], ROWS[:5])
    with pytest.raises(ValueError, match=r"'batch' has the shape \[5\], and the sharding is"):
        acts.batches(5, sharding=sharding)


@pytest.mark.parametrize("read", ["batches", "export"])
def test_a_selection_of_nothing_is_refused(acts, tmp_path, read):
    argument = 5 if read == "batches" else tmp_path / "acts.parquet"
    with pytest.raises(tapax.SiteError, match="selects nothing"):
        getattr(acts, read)(argument, sites=[])


def test_commands_describe_damage_in_a_sentence(copied, capsys):
    manifest = copied / "manifest.json"
    manifest.write_text(manifest.read_text().replace("float32", "float16"))
    for command in (["data", str(copied)], ["data", "verify", str(copied)]):
        assert main(command) == 1
        assert "was altered" in capsys.readouterr().err
