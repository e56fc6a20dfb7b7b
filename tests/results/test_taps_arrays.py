"""`Taps.select`, `Taps.stack` and `Taps.to_host`, and the keys of the results."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tapax
from tapax._results import SiteDict
from tests.oracles.closeness import assert_close
from tests.sites.test_selections import X, net

ATTN = ["block0/attn", "block1/attn", "block2/attn"]


@pytest.fixture(scope="module")
def taps():
    return tapax.capture(jax.grad(net))(X)[1]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("**/attn", ATTN),
        (["block2/attn", "block0/attn"], [ATTN[0], ATTN[2]]),
        (lambda site: site.path.startswith("block1"), ["block1/attn", "block1/mlp"]),
        (["block0/mlp", lambda site: "1/a" in site.path], ["block0/mlp", "block1/attn"]),
        ("block1/mlp", ["block1/mlp"]),
        (None, []),
        ([], []),
    ],
)
def test_a_selection_picks_sites_in_program_order(taps, selection, expected):
    found = taps.select(selection)
    assert isinstance(found, tapax.Taps)
    assert list(found.values) == list(found.grads) == found.sites.names == expected
    for name in expected:
        assert found.values[name] is taps.values[name]
        assert found.grads[name] is taps.grads[name]


def test_a_selection_of_rules_picks_operations():
    both = ["**", tapax.ops("sin", "cos")]
    _, taps = tapax.capture(net, values=both)(X)
    sines = taps.select(tapax.ops("sin"))
    assert len(sines.values) == 3 and all(site.op == "sin" for site in sines.sites)
    # Captured operations are also found by their names.
    assert list(taps.select("block1/**").values) == [n for n in taps.values if "block1" in n]
    assert len(taps.select("**").values) == len(taps.values) == 12


def test_a_selection_keeps_masks():
    def f(p, x):
        return jax.lax.cond(p, lambda x: tapax.sow(x, "yes"), lambda x: tapax.sow(-x, "no"), x)

    _, taps = tapax.capture(jax.jit(f))(True, X)
    found = taps.select("no")
    assert list(found.valid) == ["no"] and not found.valid["no"]


def test_a_selection_is_possible_inside_of_jit():
    @jax.jit
    def f(x):
        return tapax.capture(net)(x)[1].select("**/mlp").stack()

    expected, x = [], np.asarray(X)
    for _ in range(3):
        x = np.cos(np.sin(x))
        expected.append(x)
    assert_close(f(X), np.stack(expected))


def test_calls_of_a_site_are_picked_like_elsewhere():
    def f(x):
        for _ in range(3):
            x = tapax.sow(2 * x, "h")
        return x

    _, taps = tapax.capture(f)(X)
    assert list(taps.select("h").values) == ["h", "h@1", "h@2"]
    assert list(taps.select("h@1").values) == ["h@1"]
    assert list(taps.select("h@0").values) == ["h"]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("block1/mpl", "`select` was given 'block1/mpl', which matches no site in this capture"),
        (["**/attn", "**/head"], "was given '\\*\\*/head', which matches no site"),
        (lambda site: False, "the predicate .*<lambda>, which matches no site in this capture"),
        (tapax.ops("sin"), r"was given tapax.ops\('sin'\), which matches no site in this capture"),
        (tapax.at("**/attn", step=2), "`select` takes whole sites, but tapax.at.* picks a part"),
    ],
)
def test_a_selection_that_picks_nothing_raises(taps, selection, message):
    with pytest.raises(tapax.SiteError, match=message):
        taps.select(selection)


def test_the_error_of_a_selection_names_the_nearest(taps):
    with pytest.raises(tapax.SiteError, match="nearest names are 'block1/mlp'"):
        taps.select("block1/mpl")
    with pytest.raises(tapax.SiteError, match="but this capture is empty"):
        taps.select(None).select("h")
    with pytest.raises(TypeError, match="`selection` must be a selection of sites"):
        taps.select(3)


def test_stacked_values_and_gradients_are_in_program_order(taps):
    def layers(x, add):
        found = []
        for i in range(3):
            found.append(jnp.sin(x) + add[i])
            x = jnp.cos(found[-1])
        return jnp.sum(x), found

    grads, values = jax.grad(layers, 1, has_aux=True)(X, jnp.zeros((3, 2)))
    assert_close(taps.stack("**/attn"), jnp.stack(values))
    assert_close(taps.stack("**/attn", of="grads"), grads)
    assert isinstance(taps.stack("**/attn"), jax.Array)
    assert taps.stack(of="grads").shape == (6, 2)


def test_gradients_stack_in_the_order_of_the_program():
    def f(x):
        return jnp.sum(tapax.sow(3 * tapax.sow(2 * x, "first"), "second"))

    _, taps = tapax.capture(jax.grad(f), values="second")(X)
    assert_close(taps.stack("**", of="grads"), jnp.array([[3.0, 3.0], [1.0, 1.0]]))


def test_stacks_of_masks_and_host_arrays():
    def f(p, x):
        return jax.lax.cond(p, lambda x: tapax.sow(x, "yes"), lambda x: tapax.sow(-x, "no"), x)

    _, taps = tapax.capture(jax.jit(f))(True, X)
    assert taps.stack("**", of="valid").tolist() == [bool(taps.valid[name]) for name in taps.valid]
    host = taps.to_host().stack("**")
    assert isinstance(host, np.ndarray)
    assert_close(host, np.asarray(taps.stack("**")))


def test_stacks_that_cannot_be_made_raise(taps):
    def f(x):
        return tapax.sow(jnp.sum(tapax.sow(x, "wide")), "small")

    _, uneven = tapax.capture(f)(X)
    message = r"'wide' has shape \[2\] and 'small' has shape \[\]. Select fewer sites"
    with pytest.raises(tapax.SiteError, match=message):
        uneven.stack("**")
    with pytest.raises(tapax.SiteError, match="`stack` was given 'nothing', which matches no site"):
        taps.stack("nothing")
    with pytest.raises(tapax.SiteError, match=r"given .wide., but taps\.grads is empty"):
        uneven.stack("wide", of="grads")
    with pytest.raises(tapax.SiteError, match=r"which picks no site in taps\.grads"):
        uneven.stack("**", of="grads")
    with pytest.raises(ValueError, match="`of` must be 'values', 'grads' or 'valid', but is 'x'"):
        taps.stack("**", of="x")


def test_arrays_on_the_host_are_the_same(taps):
    host = taps.to_host()
    assert isinstance(host, tapax.Taps) and host.sites == taps.sites
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(host))
    assert list(host.values) == list(taps.values)
    for one, other in zip(jax.tree.leaves(host), jax.tree.leaves(taps), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    again = host.to_host()
    np.testing.assert_array_equal(again.stack("**"), host.stack("**"))


def test_sharded_arrays_and_random_keys_come_to_the_host(mesh):
    def f(x):
        tapax.sow(jax.random.split(jax.random.key(0)), "keys")
        return tapax.sow(2 * x, "h")

    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    _, taps = tapax.capture(jax.jit(f))(sharded)
    host = taps.to_host()
    np.testing.assert_array_equal(host.values["h"], 2 * x)
    assert type(host.values["h"]) is np.ndarray
    keys = jax.random.split(jax.random.key(0))
    assert host.values["keys"].dtype == keys.dtype
    np.testing.assert_array_equal(
        jax.random.key_data(host.values["keys"]), jax.random.key_data(keys)
    )


def test_traced_taps_cannot_come_to_the_host():
    @jax.jit
    def f(x):
        return tapax.capture(net)(x)[1].to_host()

    message = r"taps.values\['block0/attn'\] is traced, so it cannot be copied to the host"
    with pytest.raises(TypeError, match=message):
        f(X)


@pytest.mark.parametrize("mapping", ["values", "grads"])
def test_a_missing_key_names_the_nearest(taps, mapping):
    with pytest.raises(KeyError, match=r"no site .block1/mpl. here\. The nearest names are"):
        getattr(taps, mapping)["block1/mpl"]
    with pytest.raises(KeyError, match="'block1/mlp'"):
        getattr(taps, mapping)["block1/mpl"]


def test_a_missing_key_of_an_empty_mapping(taps):
    with pytest.raises(KeyError, match="There is no site 'h' here"):
        taps.valid["h"]
    with pytest.raises(KeyError, match="There is no site 0 here"):
        taps.values[0]


def test_mappings_are_otherwise_dicts(taps):
    values = taps.values
    assert values.get("x") is None and values.get("x", 3) == 3 and "x" not in values
    assert "x" not in values  # looking up a missing key adds nothing
    with pytest.raises(KeyError):
        values["x"]
    assert len(values) == 6
    for made in (pickle.loads(pickle.dumps(values)), copy.copy(values), copy.deepcopy(values)):
        assert type(made) is type(values) and list(made) == list(values)
        np.testing.assert_array_equal(made["block0/mlp"], values["block0/mlp"])
    again = pickle.loads(pickle.dumps(taps))
    assert again.sites == taps.sites and list(again.grads) == list(taps.grads)
    doubled = jax.tree.map(lambda x: 2 * x, values)
    assert type(doubled) is type(values)
    with pytest.raises(KeyError, match="nearest names"):
        doubled["block0/mlq"]


def test_a_glob_of_a_layer_leaves_out_its_attention_weights():
    sites = [
        tapax.Site("net/attn", kind="module"),
        tapax.Site("net/attn:weights", kind="weights"),
        tapax.Site("net/rnn:0", kind="module"),
    ]
    values = SiteDict({site.name: np.ones(i + 2) for i, site in enumerate(sites)})
    taps = tapax.Taps(values, SiteDict(), SiteDict(), tapax.SiteTable(sites))
    assert taps.stack("**/attn").shape == (1, 2)
    assert taps.stack("**/attn:weights").shape == (1, 3)
    assert list(taps.select("**/rnn").values) == ["net/rnn:0"]
    assert list(taps.select("**").values) == list(values)
