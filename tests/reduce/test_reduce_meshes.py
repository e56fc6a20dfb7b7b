"""Reducers over a mesh give the numbers of a single device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tapax
from tests.reduce.test_reduce_programs import ALL, EDGES, REDUCERS, TOL, R, captured, check, close

pytestmark = pytest.mark.once

S = np.linspace(-1, 2, 32).reshape(4, 8)

CROWD = [
    R.sum,
    R.var.total,
    R.zeros,
    R.histogram(EDGES),
    R.topk(3),
    R.quantiles([0.1, 0.9]),
    R.nonfinite,
]


def test_a_sharded_run_gives_the_numbers_of_one_device(wide):
    def loss(sow, sum_a=lambda x: x.sum(0, keepdims=True), sum_b=lambda x: x.sum(1, keepdims=True)):
        def local(x):
            body = lambda c, t: (sow(jnp.sin(c) * t, "both"), None)
            y = lax.scan(body, x, jnp.arange(1.0, 4.0))[0]
            z = sow(sum_a(y), "one")
            return jnp.sum(sow(sum_b(z), "none") ** 2)

        return local

    def over(axis, dim):
        return lambda x: lax.psum(x.sum(dim, keepdims=True), axis)

    mesh_loss = jax.shard_map(
        loss(tapax.sow, over("a", 0), over("b", 1)), mesh=wide, in_specs=P("a", "b"), out_specs=P()
    )
    few = [R.sum, R.minmax]
    asked = {
        "values": {"both": CROWD, ("one", "none"): few},
        "grads": {"**": [R.var.total, R.cosine, R.minmax]},
    }
    one = tapax.capture(jax.jit(jax.value_and_grad(loss(tapax.sow))), **asked)(jnp.asarray(S))
    many = tapax.capture(jax.jit(jax.value_and_grad(mesh_loss)), **asked)(jnp.asarray(S))
    jax.tree.map(close, many[0], one[0])
    assert set(many[1].values) == set(one[1].values)
    assert set(many[1].grads) == set(one[1].grads)
    for kind in ("values", "grads"):
        for name, value in getattr(one[1], kind).items():
            close(getattr(many[1], kind)[name], value, 10 * TOL)
    assert many[1].sites["both:sum"].loops == ("scan[3]",)
    h = np.sin(S)
    close(many[1].values["both:sum"][0], h.sum())


def test_last_is_not_combined_over_devices(wide):
    f = jax.shard_map(
        lambda x: tapax.sow(2 * x, "h"), mesh=wide, in_specs=P("a", "b"), out_specs=P("a", "b")
    )
    _, taps = captured(f, jnp.asarray(S), values={"h": R.last})
    close(taps.values["h"], 2 * S.reshape(2, 2, 4, 2).transpose(0, 2, 1, 3))


def test_units_over_a_mesh(wide):
    f = jax.shard_map(
        lambda x: tapax.sow(2 * x, "h"), mesh=wide, in_specs=P(("a", "b")), out_specs=P(("a", "b"))
    )
    x = np.arange(48.0).reshape(16, 3)
    _, taps = captured(f, jnp.asarray(x), values={"h": [R.mean(axis=-1), R.minmax(axis=-1)]})
    close(taps.values["h:mean"], 2 * x.mean(0))
    close(taps.values["h:minmax"], 2 * np.stack([x.min(0), x.max(0)], -1))


def parts(x):
    return np.asarray(x).reshape(2, 2, 4, 2).transpose(0, 2, 1, 3)


BOUNDS = (0.0, -3.0, -6.0, 1e9)


def test_branches_that_some_devices_take(wide):
    def local(x):
        def body(c, t):
            return lax.cond(c.sum() > t, lambda c: tapax.sow(c - 1, "h"), lambda c: c, c), None

        return lax.scan(body, x, jnp.array(BOUNDS))[0]

    f = jax.shard_map(local, mesh=wide, in_specs=P("a", "b"), out_specs=P("a", "b"))
    _, taps = captured(f, jnp.asarray(S), values={"h": ALL})
    c, every = parts(S), []
    for t in BOUNDS:
        ran = c.sum((2, 3)) > t
        c = np.where(ran[..., None, None], c - 1, c)
        every.append(c[ran])
    assert [e.size // 4 for e in every] == [5, 7, 7, 0]
    for r, statistic in REDUCERS.items():
        close(taps.values[f"h:{r}"][:3], np.stack([statistic(e) for e in every[:3]]))
        assert not np.any(taps.values[f"h:{r}"][3])
        flat = np.concatenate([e.ravel() for e in every])
        close(taps.values[f"h:{r}.total"], statistic(flat))
    assert taps.valid["h:minmax"].tolist() == [True] * 3 + [False]


@pytest.mark.parametrize("varying", [True, False])
@pytest.mark.parametrize("how", ["scan", "while"])
def test_devices_that_run_a_different_number_of_times(wide, varying, how):
    """Each value counts once for each time it ran, even if it is equal on all devices."""

    def local(x):
        value = lambda: tapax.sow(x if varying else jnp.ones((2, 2)), "h").sum() + 0 * x.sum()
        n = jnp.where(x.sum() > 0, 3, 1)
        start = 0 * x.sum()
        if how == "scan":
            body = lambda c, i: (lax.cond(i < n, lambda: c + value(), lambda: c), None)
            return lax.scan(body, start, jnp.arange(4))[0][None, None]
        test, body = lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + value())
        return lax.while_loop(test, body, (0 * n, start))[1][None, None]

    f = jax.shard_map(local, mesh=wide, in_specs=P("a", "b"), out_specs=P("a", "b"))
    _, taps = captured(f, jnp.asarray(S), values={"h": [R.sum.total, R.moments.total, R.mean]})
    times = np.where(parts(S).sum((2, 3)) > 0, 3, 1)
    seen = parts(S) if varying else np.ones((2, 4, 2, 2))
    every = np.concatenate([np.repeat(seen[i], times[i], axis=0) for i in range(2)])
    close(taps.values["h:sum.total"], every.sum())
    close(taps.values["h:moments.total"], [every.mean(), every.var()])
    if how == "while":
        close(taps.values["h:mean"], every.mean())


def test_a_mesh_in_a_scan_with_remat_and_vmap(wide):
    def layer(x):
        local = jax.vmap(lambda x: tapax.sow(jnp.sin(x), "h"))
        return jax.shard_map(local, mesh=wide, in_specs=P("a", "b"), out_specs=P("a", "b"))(x)

    def loss(x):
        return jnp.sum(
            lax.scan(lambda c, _: (jax.checkpoint(layer)(c), None), x, None, length=3)[0]
        )

    _, taps = captured(jax.jit(jax.grad(loss)), jnp.asarray(S), values={"h": ALL}, grads={"h": ALL})
    h = [np.sin(S)]
    for _ in range(2):
        h.append(np.sin(h[-1]))
    g = [np.ones_like(S)]
    for v in reversed(h[:-1]):
        g.insert(0, g[0] * np.cos(v))
    check(taps.values, "h", h)
    check(taps.grads, "h", g)


def test_leaves_that_vary_over_different_axes(wide):
    """A combined state may vary over more mesh axes than its parts."""
    ties = R.Reducer(
        lambda x: (jnp.full((), -jnp.inf, x.dtype), jnp.zeros((), jnp.int32)),
        lambda s, x: (x.max(), jnp.asarray(1, jnp.int32)),
        lambda a, b: (
            jnp.maximum(a[0], b[0]),
            jnp.where(a[0] >= b[0], a[1], 0) + jnp.where(b[0] >= a[0], b[1], 0),
        ),
        name="ties",
    )

    def local(x):
        body = lambda c, t: (c + tapax.sow(x * t, "h").sum(), None)
        return lax.scan(body, 0 * x.sum(), jnp.array([1.0, 2.0, 2.0]))[0][None, None]

    f = jax.shard_map(local, mesh=wide, in_specs=P("a", "b"), out_specs=P("a", "b"))
    _, taps = captured(f, jnp.asarray(S), values={"h": ties.total})
    close(taps.values["h:0"], 2 * S.max())
    assert int(taps.values["h:1"]) == 2


@pytest.mark.parametrize("spec", [P("x"), P(("x", "y"))])
def test_branches_that_examples_of_an_explicit_mesh_take(spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    x = np.linspace(-1, 2, 24).reshape(8, 3)
    reducers = [*ALL, R.sum(axis=0), R.histogram(EDGES), R.topk(2), R.last]
    one = lambda x: lax.cond(x[0] > 0, lambda x: tapax.sow(jnp.sin(x), "h"), lambda x: x, x)
    with jax.set_mesh(mesh):
        given = jax.device_put(x, spec)
        _, taps = captured(jax.vmap(one), given, values={"h": reducers})
    taken = np.sin(x[x[:, 0] > 0])
    check(taps.values, "h", [[taken]], ())
    close(taps.values["h:sum"], taken.sum(0))
    close(taps.values["h:histogram"], np.histogram(taken, EDGES)[0])
    close(taps.values["h:topk"], np.sort(taken.ravel())[:-3:-1])
    close(taps.values["h:last"], np.where(x[:, :1] > 0, np.sin(x), 0))
