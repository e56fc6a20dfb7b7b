"""`tapax.open` reads what `Taps.save` wrote, completely or not at all."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file

import tapax
from tests.sites.test_selections import X, net

DTYPES = [
    "bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16",
    "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz",
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "taps.safetensors"


def saved(taps, path):
    taps.save(path)
    return tapax.open(path)


def assert_same_arrays(found, expected):
    for kind in ("values", "grads", "valid"):
        one, other = getattr(found, kind), getattr(expected, kind)
        assert type(one) is type(other) and list(one) == list(other)
        for name, x in other.items():
            assert one[name].dtype == x.dtype and one[name].shape == x.shape, name
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                pair = jax.random.key_data(one[name]), jax.random.key_data(x)
                np.testing.assert_array_equal(*pair)
            else:
                assert isinstance(one[name], np.ndarray)
                assert one[name].tobytes() == np.asarray(x).tobytes(), name


def test_values_gradients_and_sites_come_back(path):
    _, taps = tapax.capture(jax.grad(net))(X)
    found = saved(taps, path)
    assert isinstance(found, tapax.Taps)
    assert_same_arrays(found, taps)
    assert found.sites == taps.sites
    assert repr(found) == repr(taps)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_type_come_back(path, dtype):
    def f(x):
        tapax.sow(x, "matrix")
        tapax.sow(x[0, 0], "scalar")
        return tapax.sow(x[:0], "empty")

    x = jnp.array([[0, 1, 3], [2, 1, 0]]).astype(dtype)
    _, taps = tapax.capture(f)(x)
    found = saved(taps, path)
    assert_same_arrays(found, taps)
    assert found.values["empty"].shape == (0, 3) and found.values["scalar"].shape == ()
    assert found.sites == taps.sites


def test_wide_numbers_and_other_byte_orders_come_back(path):
    given = {
        "double": np.array([1.5, np.nan, -np.inf]),
        "complex": np.array([1 + 2j, 3.25]),
        "integer": np.array([2**62 + 1]),
        "unsigned": np.array([2**64 - 1], np.uint64),
    }
    _, taps = tapax.capture(net)(X)
    wide = tapax.Taps(type(taps.values)(given), taps.grads, taps.valid, taps.sites)
    assert_same_arrays(saved(wide, path), wide)
    given["swapped"] = np.array([1.0, 2.0], ">f4")
    wide.values["swapped"] = given["swapped"]
    found = saved(wide, path).values["swapped"]
    np.testing.assert_array_equal(found, np.array([1.0, 2.0], np.float32))


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_random_keys_come_back(path, generator):
    keys = jax.random.split(jax.random.key(7, impl=generator), 3)
    _, taps = tapax.capture(lambda keys: tapax.sow(keys, "keys"))(keys)
    found = saved(taps, path)
    assert_same_arrays(found, taps)
    one, other = (jax.random.normal(k["keys"][1], (4,)) for k in (found.values, taps.values))
    np.testing.assert_array_equal(one, other)
    assert found.sites == taps.sites


def test_sharded_arrays_come_back_whole(path, mesh):
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    _, taps = tapax.capture(jax.jit(lambda x: tapax.sow(2 * x, "h")))(sharded)
    found = saved(taps, path)
    np.testing.assert_array_equal(found.values["h"], 2 * x)


def test_masks_and_loops_come_back(path):
    def f(p, x):
        x = jax.lax.cond(p, lambda x: tapax.sow(x, "yes"), lambda x: tapax.sow(-x, "no"), x)
        x, _ = jax.lax.scan(lambda x, _: (tapax.sow(x * 2, "layer"), None), x, length=3)
        return jax.lax.while_loop(lambda x: x[0] < 99, lambda x: tapax.sow(2 * x, "loop"), x)

    _, taps = tapax.capture(jax.jit(f))(True, X)
    found = saved(taps, path)
    assert_same_arrays(found, taps)
    assert set(found.valid) == {"yes", "no", "loop"}
    assert found.sites["layer"].loops == ("scan[3]",) and found.sites == taps.sites


def test_classes_come_back_as_their_names(path):
    from flax import nnx

    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    _, taps = tapax.capture(model)(X)
    assert taps.sites["Sequential/layers/0"].module is nnx.Linear
    found = saved(taps, path).sites["Sequential/layers/0"]
    assert found.module == f"{nnx.Linear.__module__}.Linear"
    assert (found.kind, found.shape, found.method) == ("module", (3,), "__call__")


def test_reducers_come_back_without_their_functions(path):
    edges = [-np.inf, 0.0, 0.5, np.inf]
    reducers = [tapax.reduce.rms, tapax.reduce.minmax, tapax.reduce.histogram(edges)]
    _, taps = tapax.capture(net, values={"**/mlp": reducers})(X)
    found = saved(taps, path)
    assert_same_arrays(found, taps)
    assert repr(found) == repr(taps)
    before, after = (
        [(str(s.reducer), s.reducer.edges, s.reducer.labels) for s in each.sites]
        for each in (taps, found)
    )
    assert after == before and len(before) > 3
    with pytest.raises(TypeError, match=r"'rms' was read from a file, .* cannot reduce anything"):
        tapax.capture(net, values={"**": found.sites[0].reducer})(X)


def test_plots_of_saved_taps_are_the_same(path):
    _, taps = tapax.capture(jax.grad(net), values={"**": tapax.reduce.minmax})(X)
    found = saved(taps, path)
    one, other = (
        [line.get_xdata().tolist() for axis in each.plot().axes for line in axis.lines]
        for each in (taps, found)
    )
    assert one == other


def test_saved_taps_can_be_used_like_a_capture(path):
    _, taps = tapax.capture(jax.grad(net))(X)
    found = saved(taps, path)
    again = path.with_name("again.safetensors")
    found.select("**/mlp").save(again)
    assert list(tapax.open(again).values) == [f"block{i}/mlp" for i in range(3)]
    found.values["block0/mlp"][0] = 5.0  # arrays can be changed
    out = tapax.edit(net, values={"block2/mlp": found.values["block2/mlp"]})(X)
    np.testing.assert_allclose(out, net(X), rtol=1e-6)
    with pytest.raises(KeyError, match="nearest names"):
        found.grads["block0/mlq"]


def test_another_reader_finds_arrays_by_name(path):
    _, taps = tapax.capture(jax.grad(net))(X)
    taps.save(path)
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == {
            f"{kind}/{name}" for kind in ("values", "grads") for name in taps.values
        }
        np.testing.assert_array_equal(
            file.get_tensor("grads/block1/attn"), taps.grads["block1/attn"]
        )
        assert [site["path"] for site in json.loads(file.metadata()["sites"])] == taps.sites.names


def test_empty_taps_come_back(path):
    _, taps = tapax.capture(net, values="block0/attn")(X)
    empty = taps.select(None)
    assert not saved(empty, path).values and not tapax.open(path).sites


def test_saving_replaces_a_file_and_makes_folders(tmp_path):
    path = tmp_path / "deep" / "er" / "run.taps"
    for scale in (1.0, 2.0):
        _, taps = tapax.capture(lambda x: tapax.sow(scale * x, "h"))(X)  # noqa: B023
        assert saved(taps, str(path)).values["h"].tolist() == (scale * np.asarray(X)).tolist()
    assert [p.name for p in path.parent.iterdir()] == ["run.taps"]


def test_a_path_that_cannot_be_written_raises(tmp_path):
    _, taps = tapax.capture(net)(X)
    (tmp_path / "file").write_text("")
    for bad in (tmp_path, tmp_path / "file" / "x.safetensors"):
        with pytest.raises(
            OSError, match=r"taps cannot be written to .*: .*Choose a writable path"
        ):
            taps.save(bad)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_save_that_fails_leaves_the_earlier_file(path, monkeypatch):
    _, taps = tapax.capture(net)(X)
    taps.save(path)
    before = path.read_bytes()

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        taps.select("**/mlp").save(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_traced_and_foreign_arrays_cannot_be_saved(path):
    with pytest.raises(TypeError, match=r"taps.values\['block0/attn'\] is traced, so it cannot be"):
        jax.jit(lambda x: tapax.capture(net)(x)[1].save(path))(X)
    _, taps = tapax.capture(net)(X)
    words = jax.tree.map(lambda x: np.array(["a", "b"]), taps)
    with pytest.raises(TypeError, match=r"values\['block0/attn'\] must be an array of numbers"):
        words.save(path)
    assert not path.exists()


@pytest.mark.parametrize("cut", [0, 4, 100, -200, -1])
def test_a_file_that_was_cut_off_raises(path, cut):
    _, taps = tapax.capture(net)(X)
    taps.save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        tapax.open(path)
    assert "complete" in str(caught.value)


def test_a_file_of_another_kind_raises(path):
    save_file({"w": np.ones(3)}, path)
    with pytest.raises(ValueError, match=r"does not say that it is one\. .*`Taps.save` wrote"):
        tapax.open(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        tapax.open(path)
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        tapax.open(path.with_name("missing"))


def test_a_file_of_a_later_version_raises(path):
    save_file({}, path, {"tapax_taps": "99"})
    with pytest.raises(RuntimeError, match="in version 99 of the format of taps, but this tapax"):
        tapax.open(path)


def test_a_file_whose_parts_do_not_fit_raises(path):
    about = {"tapax_taps": "1", "arrays": '{"values": {"h": "float32"}}', "sites": "[]"}
    save_file({}, path, about)
    with pytest.raises(ValueError, match="cannot be read: its parts do not fit together"):
        tapax.open(path)


SAVE_FOREVER = """
import sys, itertools, numpy as np, jax.numpy as jnp, tapax
f = lambda x: tapax.sow(2 * x, "a") + tapax.sow(2 * x, "b")
for i in itertools.count():
    tapax.capture(f)(jnp.full((300, 300), float(i)))[1].save(sys.argv[1])
"""


@pytest.mark.once
def test_a_kill_leaves_a_whole_file(path):
    process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, path])
    try:
        end = time.monotonic() + 120
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        for _ in range(30):  # every read finds one complete capture
            found = tapax.open(path)
            assert len({float(x) for name in "ab" for x in np.unique(found.values[name])}) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = tapax.open(path)
    assert found.values["a"].shape == (300, 300)
    np.testing.assert_array_equal(found.values["a"], found.values["b"])


def test_scanned_layers_come_back_as_they_were(tmp_path):
    def layer(x, t):
        with tapax.scope("layers"):
            return tapax.sow(x * t, "h"), None

    f = lambda x: jax.lax.scan(layer, x, jnp.arange(1.0, 4.0))[0]
    _, taps = tapax.capture(f)(jnp.ones(2))
    taps.save(tmp_path / "taps.safetensors")
    read = tapax.open(tmp_path / "taps.safetensors")
    assert read.sites["layers/h"].layers == taps.sites["layers/h"].layers
    assert list(read.select("layers/*").values) == ["layers/h"]
    with pytest.raises(tapax.SiteError, match="matches no site"):
        read.select("layers/1/h")  # the captured arrays are stacked
