"""`shard_map` on several devices adds a leading axis per mesh axis over which a value varies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tapax
from tests.oracles.closeness import assert_close

X = jnp.arange(16.0).reshape(4, 4)


def blocks(x):
    """Split `x` of shape (4, 4) into the shards of a 2 x 2 mesh: (2, 2, 2, 2)."""
    return np.asarray(x).reshape(2, 2, 2, 2).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("checked", [True, False])
def test_values_and_gradients_of_each_device_are_stacked(mesh, checked):
    def local(x):
        return lax.psum(jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2), ("a", "b"))

    total = jax.shard_map(local, mesh=mesh, in_specs=P("a", "b"), out_specs=P(), check_vma=checked)
    for step in (total, jax.jit(total)):
        out, taps = tapax.capture(step)(X)
        assert_close(out, jnp.sum(jnp.sin(X) ** 2))
        assert_close(taps.values["h"], blocks(jnp.sin(X)))
    for step in (jax.grad(total), jax.jit(jax.grad(total)), jax.grad(jax.jit(total))):
        _, taps = tapax.capture(step)(X)
        assert_close(taps.values["h"], blocks(jnp.sin(X)))
        assert_close(taps.grads["h"], blocks(2 * jnp.sin(X)))


def test_replicated_values_have_no_mesh_axis(mesh):
    def local(x):
        partial = tapax.sow(jnp.sum(x), "partial")
        over_a = tapax.sow(lax.psum(partial, "a"), "over_a")
        return tapax.sow(lax.psum(over_a, "b"), "total")

    f = jax.shard_map(local, mesh=mesh, in_specs=P("a", "b"), out_specs=P())
    _, taps = tapax.capture(f)(X)
    sums = blocks(X).sum((2, 3))
    assert_close(taps.values["partial"], sums)
    assert_close(taps.values["over_a"], sums.sum(0))
    assert_close(taps.values["total"], sums.sum())
    assert taps.sites["partial"].loops == ("a[2]", "b[2]")
    assert taps.sites["over_a"].loops == ("b[2]",)


def test_captured_shards_stay_on_their_devices(mesh):
    f = jax.shard_map(
        lambda x: tapax.sow(2 * x, "h") + 1, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b")
    )
    x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    _, taps = tapax.capture(jax.jit(f))(x)
    h = taps.values["h"]
    assert h.shape == (2, 2, 2, 2)
    assert {s.data.shape for s in h.addressable_shards} == {(1, 1, 2, 2)}
    assert len({s.device for s in h.addressable_shards}) == 4


@pytest.mark.parametrize("checked", [True, False])
def test_loops_and_branches_inside_a_mesh_are_captured(mesh, checked):
    def local(x):
        def body(c, t):
            bigger = lambda c: tapax.sow(c * 2, "big")
            return lax.cond(jnp.sum(c) > 40, bigger, lambda c: c + t, c), None

        y = lax.scan(body, x, jnp.arange(3.0))[0]
        step = lambda c: (c[0] + 1, tapax.sow(jnp.sqrt(c[1]), "root"))
        return lax.while_loop(lambda c: c[0] < 2, step, (0, y))[1]

    f = jax.shard_map(
        local, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=checked
    )
    out, taps = tapax.capture(jax.jit(f))(X)
    assert_close(out, jax.jit(f)(X))
    parts = blocks(X)
    for i in range(2):
        for j in range(2):
            c = parts[i, j]
            for t in range(3):
                ran = c.sum() > 40
                c = c * 2 if ran else c + t
                assert bool(taps.valid["big"][i, j, t]) == ran
                assert_close(taps.values["big"][i, j, t], c if ran else 0 * c)
            assert_close(taps.values["root"][i, j], np.sqrt(np.sqrt(c)))
            assert int(np.asarray(taps.valid["root"]).reshape(-1)[0]) == 2


def test_only_manual_axes_are_added(mesh):
    f = jax.shard_map(
        lambda x: tapax.sow(2 * x, "h"),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P("a"),
        axis_names={"a"},
    )
    _, taps = tapax.capture(jax.jit(f))(X)
    assert_close(taps.values["h"], 2 * X.reshape(2, 2, 4))


def test_shard_map_is_captured_in_a_scan_with_remat(mesh):
    def layer(x):
        local = lambda x: tapax.sow(jnp.sin(x), "h")
        return jax.shard_map(local, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))(x)

    def loss(x):
        body = lambda c, _: (jax.checkpoint(layer)(c), None)
        return jnp.sum(lax.scan(body, x, None, length=3)[0])

    _, taps = tapax.capture(jax.jit(jax.grad(loss)))(X)
    h = [jnp.sin(X)]
    for _ in range(2):
        h.append(jnp.sin(h[-1]))
    assert_close(taps.values["h"], np.stack([blocks(v) for v in h]))
    g = [jnp.ones_like(X)]
    for v in reversed(h[:-1]):
        g.insert(0, g[0] * jnp.cos(v))
    assert_close(taps.grads["h"], np.stack([blocks(v) for v in g]))


def test_shardings_of_jit_are_kept(mesh):
    sharded = NamedSharding(mesh, P("a", None))
    whole = NamedSharding(mesh, P())
    f = jax.jit(lambda x: tapax.sow(2 * x, "h") + 1, in_shardings=sharded, out_shardings=whole)
    out, taps = tapax.capture(f)(X)
    assert out.sharding.is_equivalent_to(f(X).sharding, 2)
    assert_close(out, 2 * X + 1)
    assert_close(taps.values["h"], 2 * X)
    two = jax.jit(
        lambda x, y: {"s": tapax.sow(x + y, "h"), "x": x},
        in_shardings=(sharded, None),
        out_shardings={"s": sharded, "x": whole},
    )
    out, taps = tapax.capture(two)(X, X)
    assert out["s"].sharding.is_equivalent_to(sharded, 2)
    assert out["x"].sharding.is_equivalent_to(whole, 2)
    out, taps = tapax.capture(lambda x: f(x) * 2)(X)
    assert_close(out, 4 * X + 2)


def test_values_with_explicit_sharding_are_captured():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(mesh, P("d", None)))

        def loss(x):
            def body(c, t):
                return tapax.sow(c * t, "h"), None

            return jnp.sum(lax.scan(body, x, jnp.arange(1.0, 3.0))[0])

        _, taps = tapax.capture(jax.jit(jax.value_and_grad(loss)))(x)
        assert_close(taps.values["h"], np.stack([x, 2 * x]))
        assert_close(taps.grads["h"], np.stack([np.full((4, 2), 2.0), np.ones((4, 2))]))


def test_rules_select_the_results_of_a_shard_map(mesh):
    def f(x):
        specs = {"in_specs": P("a"), "out_specs": (P("a"), P("a"))}
        return jax.shard_map(lambda x: (jnp.sin(x), 2 * x), mesh=mesh, **specs)(x)

    x = jnp.arange(4.0)
    out, taps = tapax.capture(f, values=tapax.ops("shard_map"))(x)
    assert_close(taps.values["shard_map:0"], jnp.sin(x))
    np.testing.assert_array_equal(taps.values["shard_map:1"], 2 * x)
    np.testing.assert_array_equal(out[1], 2 * x)


def test_sites_that_cannot_be_masked_are_refused(mesh):
    local = lambda x: tapax.sow(2 * x, "h")
    inner = jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    f = jax.vmap(lambda p, x: lax.cond(p, inner, lambda x: x, x))
    with pytest.raises(tapax.SiteError, match="cannot tell for which examples it ran"):
        tapax.capture(f)(jnp.array([True, False]), jnp.ones((2, 4)))


def test_at_selects_iterations_with_a_mesh_in_the_loop(mesh):
    layer = jax.shard_map(
        lambda x: tapax.sow(x + 1, "h"), mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    f = lambda x: lax.scan(lambda c, _: (layer(c), None), x, None, length=3)[0]
    _, taps = tapax.capture(f, values=tapax.at("h", step=1))(jnp.zeros(4))
    assert_close(taps.values["h"], [[2, 2], [2, 2]])
    with pytest.raises(tapax.SiteError, match="is in no loop"):
        tapax.capture(layer, values=tapax.at("h", step=1))(jnp.zeros(4))


def test_replicated_value_in_a_branch_that_only_some_devices_take(mesh):
    def local(x, n):
        def step(state):
            i, x = state
            x = lax.cond(x[0] > i, lambda x: x + tapax.sow(n + i, "k"), lambda x: x, x)
            return i + 1, x

        return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]

    specs = {"in_specs": (P("a"), P()), "out_specs": P("a")}
    f = jax.jit(jax.shard_map(local, mesh=mesh, **specs))
    # The first device takes the branch in every iteration, the second never does.
    args = jnp.array([0.5, 0.5, -9.0, -9.0]), jnp.float32(10.0)
    out, taps = tapax.capture(f)(*args)
    np.testing.assert_array_equal(out, f(*args))
    np.testing.assert_array_equal(taps.valid["k"], [3, 0])
    np.testing.assert_array_equal(taps.values["k"], [12, 0])
    _, taps = tapax.capture(f, steps=4)(*args)
    np.testing.assert_array_equal(taps.valid["k"], [[True] * 3 + [False], [False] * 4])
    np.testing.assert_array_equal(taps.values["k"], [[10, 11, 12, 0], [0] * 4])
    _, taps = tapax.capture(f, values=tapax.at("k", step=1))(*args)
    np.testing.assert_array_equal(taps.values["k"], [11, 0])


def test_operations_in_a_mesh_are_marked(mesh):
    f = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    _, taps = tapax.capture(jax.jit(f), values=tapax.ops("sin"))(jnp.arange(4.0))
    assert_close(taps.values["sin"], jnp.sin(jnp.arange(4.0)).reshape(2, 2))


def test_each_device_of_a_mesh_folds_separately(mesh):
    fold = {"reduce": lambda a, b: a + jnp.sum(b), "init": lambda: 0.0}
    layer = jax.shard_map(
        lambda x: tapax.sow(x, "s", **fold), mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        _, taps = tapax.capture(wrap(layer))(jnp.arange(4.0))
        assert_close(taps.values["s"], [1.0, 5.0])
    looped = lambda x: lax.scan(lambda c, _: (layer(c), None), x, None, length=2)[0]
    with pytest.raises(tapax.SiteError, match="folded separately on each device of a shard_map"):
        tapax.capture(looped)(jnp.arange(4.0))
    with pytest.raises(tapax.SiteError, match="has more than one fold"):
        tapax.capture(lambda x: layer(layer(x)))(jnp.arange(4.0))


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("loop", ["scan", "while"])
def test_loops_inside_a_mesh_carry_folds(mesh, loop, checked):
    sow = lambda x: tapax.sow(x, "h", reduce=lambda total, x: total + x, init=float)

    def local(x):
        if loop == "scan":
            body = lambda c, t: (sow(jnp.sin(c) * t), None)
            return lax.scan(body, x, jnp.arange(1.0, 3.0))[0]
        body = lambda c: (c[0] + 1, sow(jnp.sin(c[1]) * c[0]))
        return lax.while_loop(lambda c: c[0] < 3, body, (jnp.float32(1), x))[1]

    spec = P("a", "b")
    f = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=checked)
    _, taps = tapax.capture(f)(X)
    first = np.sin(np.asarray(X, np.float64))
    assert_close(taps.values["h"], blocks(first + 2 * np.sin(first)), 1e-5)


@pytest.mark.parametrize("checked", [True, False])
def test_mapped_loops_that_end_earlier_on_some_devices(mesh, checked):
    def one(x):
        body = lambda c: (c[0] + 1, tapax.sow(c[1] / 2, "h"))
        return lax.while_loop(lambda c: c[1].sum() > 1, body, (0, x))

    def local(x):
        counts, x = jax.vmap(one)(x)
        return x + counts[:, None].astype(x.dtype)

    spec = P(("a", "b"))
    f = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=checked)
    x, halvings = np.asarray(X, np.float64), np.zeros(4)
    while (going := x.sum(1) > 1).any():
        x, halvings = np.where(going[:, None], x / 2, x), halvings + going
    out, taps = tapax.capture(f)(X)
    assert_close(out, x + halvings[:, None])
    assert_close(taps.values["h"].reshape(4, 4), x)
    assert taps.valid["h"].ravel().tolist() == halvings.tolist()
    assert_close(tapax.edit(f, values={"h": lambda h: h})(X), out)
    total = tapax.capture(f, values={"h": tapax.reduce.sum})(X)[1].values["h"]
    assert_close(total, sum(np.asarray(X[i]).sum() * (1 - 0.5 ** halvings[i]) for i in range(4)))


def test_sites_in_branches_keep_their_sharding_in_explicit_mode():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("x", "y")))
        f = lambda p, x: lax.cond(p, lambda x: tapax.sow(2 * x, "h"), lambda x: x, x)
        _, taps = tapax.capture(jax.jit(f))(True, x)
        assert taps.values["h"].sharding.spec == P("x", "y")
        loop = lambda x: lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, tapax.sow(c[1] + 1, "h")), (0, x)
        )[1]
        _, taps = tapax.capture(jax.jit(loop), steps=3)(x)
        assert taps.values["h"].sharding.spec == P(None, "x", "y")


@pytest.mark.parametrize("name", ["scan", "while"])
def test_axis_of_a_mesh_may_have_the_name_of_a_loop(name):
    mesh = jax.make_mesh((2,), (name,), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.arange(4.0)

    @jax.shard_map(mesh=mesh, in_specs=P(name), out_specs=P(name))
    def f(x):
        return tapax.sow(jnp.sin(x), "h") * 2

    _, taps = tapax.capture(f)(x)
    assert_close(taps.values["h"], jnp.sin(x).reshape(2, 2))
    zeros = tapax.perturbations(f)(x)
    assert zeros["h"].shape == (2, 2)
    assert_close(tapax.perturbed(f)({"h": jnp.ones((2, 2))}, x), 2 * jnp.sin(x) + 2)
    assert_close(tapax.prefix(f, "h")(x), jnp.sin(x).reshape(2, 2))
