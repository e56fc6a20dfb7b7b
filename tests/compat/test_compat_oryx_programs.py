"""`tapax.compat.oryx` in loops, branches and transformations, against numbers by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tapax
from tapax.compat.oryx import call_and_reap, sow_cond
from tests.compat.test_compat_oryx import (
    call_var,
    harvest_var,
    plant_var,
    reap_var,
    same,
    scanned,
    var,
)

STEPS = np.array([1.0, 2.0, 4.0, 7.0, 11.0])
eagerly = pytest.mark.parametrize("eager", [False, True], ids=["traced", "eager"])


@eagerly
def test_a_scan_appends_and_clobbers(eager):
    with jax.disable_jit(eager):
        same(harvest_var(scanned("append"))({}, 1.0), ((11.0, STEPS), {"x": STEPS}))
        same(harvest_var(scanned("clobber"))({}, 1.0), ((11.0, STEPS), {"x": 11.0}))
        # Going backwards, the last iteration is the first.
        down = np.array([11.0, 11.0, 10.0, 8.0, 5.0])
        same(reap_var(scanned("append", reverse=True))(1.0), {"x": down})
        same(reap_var(scanned("clobber", reverse=True))(1.0), {"x": 11.0})


@eagerly
def test_plants_in_a_scan(eager):
    each = jnp.array([3.0, 1.0, 4.0, 1.0, 5.0])
    with jax.disable_jit(eager):
        same(plant_var(scanned("append"))({"x": each}, 1.0), (5.0, each))
        same(plant_var(scanned("append", reverse=True))({"x": each}, 1.0), (3.0, each))
        same(plant_var(scanned("clobber"))({"x": 2.0}, 1.0), (2.0, np.full(5, 2.0)))


def test_append_in_nested_scans():
    def g(x):
        inner = lambda c, t: (c, var(x * t, name="x", mode="append"))
        outer = lambda c, t: lax.scan(inner, c, t * jnp.arange(3.0))
        return lax.scan(outer, 0.0, jnp.arange(1.0, 3.0))[1]

    table = np.array([[0.0, 2.0, 4.0], [0.0, 4.0, 8.0]])
    same(harvest_var(g)({}, 2.0), (table, {"x": table}))
    same(plant_var(g)({"x": -table}, 2.0), -table)


def test_strict_in_a_scan_raises():
    words = (
        r"Cannot use strict mode for 'x' inside `scan`. It is sown at .*:\d+: use mode 'clobber'"
    )
    with pytest.raises(ValueError, match=words):
        reap_var(scanned("strict"))(1.0)
    for plants in ({"x": 1.0}, {}):
        with pytest.raises(ValueError, match=words):
            plant_var(scanned("strict"))(plants, 1.0)


def looped(mode, until=5):
    def body(carry):
        i, val, total = carry
        val = var(val, name="x", mode=mode)
        return i + 1, val + 1.0, var(total, name="y", mode="clobber") + val

    return lambda init: lax.while_loop(lambda c: c[0] < until, body, init)


@eagerly
def test_a_while_loop_gives_the_last_and_is_planted_in_every_iteration(eager):
    start = (0, 0.0, 0.0)
    with jax.disable_jit(eager):
        same(reap_var(looped("clobber"))(start), {"x": 4.0, "y": 6.0})
        same(plant_var(looped("clobber"))({"x": 5.0}, start), (5, 6.0, 25.0))
        same(harvest_var(looped("clobber"))({"x": 5.0}, start), ((5, 6.0, 25.0), {"y": 20.0}))
        same(reap_var(looped("clobber", until=0))(start), {"x": 0.0, "y": 0.0})


@pytest.mark.parametrize("mode", ["strict", "append"])
def test_other_modes_in_a_while_loop_raise(mode):
    words = (
        "Must use clobber or cond_clobber mode for 'x' inside of a `while_loop`. It is sown at "
        rf".*:\d+ in mode '{mode}'."
    )
    with pytest.raises(ValueError, match=words):
        reap_var(looped(mode))((0, 0.0, 0.0))
    for plants in ({"x": 4.0}, {}):
        with pytest.raises(ValueError, match=words):
            plant_var(looped(mode))(plants, (0, 0.0, 0.0))
    same(reap_var(looped(mode), blocklist=["x"])((0, 0.0, 0.0)), {"y": 6.0})


@eagerly
@pytest.mark.parametrize("known", [True, False], ids=["scan", "while"])
def test_sow_cond_reaps_any_iteration(known, eager):
    def body(i, x):
        x = x + i
        values = [sow_cond(x, i == k, tag="var", name=f"x{k}") for k in range(6)]
        return lax.select_n(i, *values)

    def g(n, x):
        return lax.fori_loop(0, 5 if known else n, body, x)

    with jax.disable_jit(eager):
        out, reaps = harvest_var(g)({"x3": 0.5}, 5, 1.0)
    same(out, 4.5)
    same(reaps, {"x0": 1.0, "x1": 2.0, "x2": 4.0, "x4": 4.5, "x5": 0.0})


def test_sow_cond_clobbers_only_where_the_predicate_holds():
    def g(p, x):
        var(x, name="x", mode="clobber")
        return sow_cond(x + 1, p, tag="var", name="x")

    same(call_var(g)(jnp.array(True), 1.0), (2.0, {"x": 2.0}))
    same(call_var(g)(jnp.array(False), 1.0), (2.0, {"x": 1.0}))
    same(plant_var(g)({"x": 7.0}, jnp.array(False), 1.0), 7.0)
    each = jax.vmap(call_var(g), (0, None))(jnp.array([True, False]), 1.0)
    same(each, (np.full(2, 2.0), {"x": np.array([2.0, 1.0])}))
    same(g(jnp.array(True), 1.0), 2.0)


def switched(index, x, mode="strict"):
    branches = [
        lambda x: var(x, name="x", mode=mode) + 2,
        lambda x: var(x + 2, name="x", mode=mode) + 3,
        lambda x: var(x + 3, name="x", mode=mode) + 4,
    ]
    return lax.switch(index, branches, x)


@pytest.mark.parametrize("mode", ["strict", "clobber", "append"])
@pytest.mark.parametrize("index", range(3))
def test_the_branches_of_a_switch_sow_one_name(index, mode):
    g = functools.partial(switched, mode=mode)
    value = [1.0, 3.0, 4.0][index]
    same(call_var(g)(jnp.array(index), 1.0), (value + index + 2, {"x": value}))
    same(harvest_var(g)({"x": 4.0}, jnp.array(index), 1.0), (6.0 + index, {}))


@pytest.mark.parametrize("mode", ["strict", "clobber", "append"])
def test_and_so_they_do_under_vmap(mode):
    g = functools.partial(switched, mode=mode)
    index = jnp.array([2, 0, 1, 0])
    expected = np.array([8.0, 3.0, 6.0, 3.0]), {"x": np.array([4.0, 1.0, 3.0, 1.0])}
    for h in (jax.vmap(call_var(g), (0, None)), call_var(jax.vmap(g, (0, None)))):
        same(h(index, 1.0), expected)
    plants = {"x": jnp.arange(4.0)}
    same(plant_var(jax.vmap(g, (0, None)))(plants, index, 1.0), np.array([4.0, 3.0, 5.0, 5.0]))


def unlike(first, second):
    """Make a conditional whose branches sow the given names."""

    def branch(names):
        def run(x):
            for name in names:
                x = var(x + 1, name=name)
            return x

        return run

    return lambda p, x: lax.cond(p, branch(first), branch(second), x)


MISMATCHES = {
    "other name": (unlike("x", "y"), "Missing sow in branch: 'x'. It is sown at .* sows 'y'."),
    "more names": (
        unlike("x", "xy"),
        "Mismatching number of `sow`s between branches. One .* sows 'x', 'y', another 'x'.",
    ),
    "no name": (
        unlike("", "x"),
        "Mismatching number of `sow`s between branches. One .* sows 'x', another nothing.",
    ),
    "shape": (
        lambda p, x: lax.cond(
            p, lambda x: var(x, name="x"), lambda x: jnp.sum(var(jnp.stack([x, x]), name="x")), x
        ),
        r"Mismatched shape between branches: 'x'. The shape is \(\) at .*, and \(2,\) at ",
    ),
    "dtype": (
        lambda p, x: lax.cond(p, lambda x: var(x, name="x"), lambda x: x + var(x > 0, name="x"), x),
        "Mismatched dtype between branches: 'x'. The dtype is float.* at .*, and bool at ",
    ),
}


@pytest.mark.parametrize(("g", "words"), MISMATCHES.values(), ids=MISMATCHES)
def test_branches_that_sow_unlike_values_raise(g, words):
    run = (reap_var(g), functools.partial(plant_var(g), {}), functools.partial(harvest_var(g), {}))
    for h in (*run, *map(jax.jit, run)):
        with pytest.raises(ValueError, match=words):
            h(jnp.array(True), 1.0)
    with pytest.raises(ValueError, match=words):
        reap_var(jax.grad(g, argnums=1))(jnp.array(True), 1.0)


def test_branches_may_differ_in_names_that_are_not_harvested():
    g = unlike("x", "xy")
    for p, value in ((True, 2.0), (False, 2.0)):
        same(reap_var(g, blocklist=["y"])(jnp.array(p), 1.0), {"x": value})
        same(reap_var(g, allowlist=["x"])(jnp.array(p), 1.0), {"x": value})
    same(call_and_reap(g, tag="other")(jnp.array(False), 1.0), (3.0, {}))
    same(plant_var(g, allowlist=["x"])({"x": 5.0}, jnp.array(False), 1.0), 6.0)


def test_one_branch_alone_may_sow_on_condition_elsewhere():
    def g(p, x):
        yes = lambda x: sow_cond(x, x > 0, tag="var", name="x")
        return lax.cond(p, yes, lambda x: sow_cond(2 * x, x > 5, tag="var", name="x"), x)

    same(reap_var(g)(jnp.array(True), 1.0), {"x": 1.0})
    same(reap_var(g)(jnp.array(False), 1.0), {"x": 0.0})
    alone = lambda p, x: lax.cond(p, lambda x: sow_cond(x, True, tag="var", name="x"), abs, x)
    with pytest.raises(ValueError, match="Mismatching number of `sow`s between branches"):
        reap_var(alone)(jnp.array(True), 1.0)


def test_two_conditionals_are_two_sows():
    def g(p, x):
        both = lambda x: lax.cond(p, lambda x: var(x, name="x"), lambda x: var(x, name="x"), x)
        return both(both(x))

    with pytest.raises(tapax.SiteError, match="and again at"):
        reap_var(g)(jnp.array(True), 1.0)
    # `vmap` turns both conditionals into one selection: a value counts only where both ran.
    apart = lambda p, q, x: (
        lax.cond(p, lambda x: var(x, name="x"), lambda x: x, x),
        lax.cond(q, lambda x: x, lambda x: var(x + 1, name="x"), x),
    )
    p, q = jnp.array([True, True, False]), jnp.array([True, False, False])
    same(reap_var(jax.vmap(apart, (0, 0, None)))(p, q, 1.0), {"x": np.array([1.0, np.nan, 2.0])})


@pytest.mark.parametrize("outer", [True, False], ids=["vmap(reap)", "reap(vmap)"])
def test_nested_conditionals_under_vmap_reap_the_branch_that_ran(outer):
    def g(p, q, x):
        jitted = jax.jit(lambda x: var(2 * x, name="x"))
        inner = lambda x: lax.cond(q, lambda x: var(x, name="x"), jitted, x)
        return lax.cond(p, inner, lambda x: var(3 * x, name="x"), x)

    p, q = (jnp.array(a) for a in ([True, True, False, False], [True, False, True, False]))
    axes = (0, 0, None)
    h = jax.vmap(reap_var(g), axes) if outer else reap_var(jax.vmap(g, axes))
    same(h(p, q, 1.0), {"x": np.array([1.0, 2.0, 3.0, 3.0])})


def test_appended_in_branches_of_a_scan():
    def g(x):
        def body(c, t):
            yes = lambda c: var(c + t, name="x", mode="append")
            c = lax.cond(t % 2 == 0, yes, lambda c: var(-c, name="x", mode="append"), c)
            return c, None

        return lax.scan(jax.jit(body), x, jnp.arange(4.0))[0]

    same(call_var(g)(1.0), (-1.0, {"x": np.array([1.0, -1.0, 1.0, -1.0])}))


def test_under_jit_closed_over_values_are_seen():
    def g(x):
        return jax.jit(lambda _: var(x, name="x"))(1.0)

    same(harvest_var(g)({}, 3.0), (3.0, {"x": 3.0}))
    same(harvest_var(g)({"x": 2.0}, 3.0), (2.0, {}))


def test_a_jit_stays_a_jit_and_no_mark_is_left():
    g = jax.jit(lambda x: var(x, name="x") + 1)
    for h, args in ((plant_var(g), ({"x": 2.0}, 1.0)), (reap_var(g), (1.0,))):
        jaxpr = jax.make_jaxpr(h)(*args)
        assert {e.primitive.name for e in jaxpr.eqns} & {"jit", "pjit"}
        assert "tap" not in str(jaxpr) and not jaxpr.effects


def test_a_function_that_ran_before_is_traced_afresh():
    g = jax.jit(lambda x: var(2 * x, name="h"))
    g(1.0)
    same(reap_var(g)(1.0), {"h": 2.0})
    same(plant_var(g)({"h": 9.0}, 1.0), 9.0)
    same(g(1.0), 2.0)


@pytest.mark.parametrize("inner", [True, False])
def test_reap_and_plant_under_vmap(inner):
    g = lambda x: var(2 * x, name="h") + 1
    x = jnp.arange(3.0)
    run = call_var(jax.vmap(g)) if inner else jax.vmap(call_var(g))
    same(run(x), (2 * x + 1, {"h": 2 * x}))
    planted = plant_var(jax.vmap(g)) if inner else jax.vmap(plant_var(g))
    same(planted({"h": -x}, x), 1 - x)
    same(plant_var(jax.vmap(g))({"h": 5.0}, x), np.full(3, 6.0))


def test_derivatives_by_plants_and_through_reaps():
    g = lambda x: var(x**2, name="y") ** 3
    same(jax.grad(plant_var(g))({"y": 2.0}, 5.0), {"y": 12.0})
    same(jax.grad(plant_var(g), argnums=1)({"y": 2.0}, 5.0), 0.0)
    same(jax.grad(lambda x: reap_var(g)(x)["y"])(5.0), 10.0)
    same(harvest_var(jax.grad(g))({}, 2.0), (192.0, {"y": 4.0}))
    # The plant is a constant, so no cotangent flows back through it.
    same(plant_var(jax.grad(g))({"y": 2.0}, 5.0), 0.0)
    steps = plant_var(lambda x: jnp.sum(scanned("append")(x)[1] * jnp.arange(5.0)))
    same(jax.grad(steps)({"x": jnp.ones(5)}, 1.0), {"x": np.arange(5.0)})


def test_reap_and_plant_under_checkpoint():
    @jax.checkpoint
    def inner(x):
        y = var(x * 2, name="y")
        return y**2

    for g in (inner, jax.checkpoint(lambda x: inner(x))):
        same(reap_var(g)(2.0), {"y": 4.0})
        same(harvest_var(jax.grad(g))({}, 2.0), (16.0, {"y": 4.0}))
        same(jax.grad(plant_var(g))({"y": 3.0}, 2.0), {"y": 6.0})


def custom(kind, in_rule=""):
    """Make the sine with a wrong derivative, and a sow in its function or in one of its rules."""
    mark = lambda where, x: var(2 * x, name="y") if where == in_rule else 2 * x
    if kind == "jvp":
        g = jax.custom_jvp(lambda x: mark("", x) + jnp.sin(x))
        g.defjvp(lambda xs, ts: (mark("rule", xs[0]) + xs[0], 5.0 * ts[0]))
    else:
        g = jax.custom_vjp(lambda x: mark("", x) + jnp.sin(x))
        fwd = lambda x: (mark("rule", x) + x, x)
        g.defvjp(fwd, lambda x, ct: (mark("bwd", x) * 0 + 5.0 * ct,))
    return g


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_reap_under_custom_derivatives(kind):
    g = custom(kind)
    same(call_var(g)(2.0), (4 + np.sin(2.0), {"y": 4.0}))
    same(plant_var(g)({"y": 1.0}, 2.0), 1 + np.sin(2.0))
    same(jax.grad(lambda x: call_var(g)(x)[0])(2.0), 5.0)
    same(call_var(jax.grad(g))(2.0)[0], 5.0)
    same(jax.grad(plant_var(g), argnums=1)({"y": 1.0}, 2.0), 5.0)
    with pytest.raises(tapax.SiteError, match="no derivative with respect to its perturbation"):
        jax.grad(plant_var(g))({"y": 1.0}, 2.0)
    rule = custom(kind, "rule")
    same(reap_var(jax.value_and_grad(rule))(2.0), {"y": 4.0})
    same(plant_var(jax.value_and_grad(rule))({"y": 1.0}, 2.0), (3.0, 5.0))
    assert reap_var(rule)(2.0) == {}


def test_a_rule_that_runs_because_of_a_derivative_around_the_harvest_is_reaped():
    rule = custom("jvp", "rule")
    same(jax.jvp(call_var(rule), (2.0,), (1.0,)), ((6.0, {"y": 4.0}), (5.0, {"y": 0.0})))
    same(jax.value_and_grad(call_var(rule), has_aux=True)(2.0), ((6.0, {"y": 4.0}), 5.0))
    rows = np.arange(3.0)
    mapped = jax.vmap(lambda x: jax.jvp(call_var(rule), (x,), (1.0,))[0])
    same(mapped(jnp.arange(3.0)), (3 * rows, {"y": 2 * rows}))
    same(jax.jit(jax.vmap(jax.grad(lambda x: call_var(rule)(x)[0])))(jnp.arange(3.0)), rows * 0 + 5)
    pullback = custom("vjp", "rule")
    same(jax.value_and_grad(call_var(pullback), has_aux=True)(2.0), ((6.0, {"y": 4.0}), 5.0))
    same(call_var(pullback)(2.0), (4 + np.sin(2.0), {}))


def test_a_plant_reaches_a_rule_that_runs_because_of_a_derivative_around_the_harvest():
    rule, pullback, plants = custom("jvp", "rule"), custom("vjp", "rule"), {"y": 1.0}
    # There is no derivative with respect to the plant.
    same(jax.jvp(plant_var(rule), (plants, 2.0), (plants, 1.0)), (3.0, 5.0))
    same(jax.grad(plant_var(rule), argnums=(0, 1))(plants, 2.0), ({"y": 0.0}, 5.0))
    for g in (rule, pullback):
        same(jax.value_and_grad(plant_var(g), argnums=1)(plants, 2.0), (3.0, 5.0))
        both = jax.value_and_grad(harvest_var(g), argnums=1, has_aux=True)
        same(both(plants, 2.0), ((3.0, {}), 5.0))
        same(jax.jit(both)(plants, 2.0), ((3.0, {}), 5.0))
        same(both({}, 2.0), ((6.0, {"y": 4.0}), 5.0))
        with pytest.warns(UserWarning, match="a value for 'y', which is ignored"):
            same(plant_var(g)(plants, 2.0), 4 + np.sin(2.0))
    rows = jnp.arange(3.0)
    mapped = jax.vmap(jax.value_and_grad(plant_var(rule), argnums=1), (None, 0))
    same(mapped(plants, rows), (1 + np.arange(3.0), np.full(3, 5.0)))


def test_the_sows_of_a_differentiated_function_with_a_rule_are_not_reaped():
    same(jax.value_and_grad(call_var(custom("jvp")), has_aux=True)(2.0), ((6.0, {}), 5.0))
    same(jax.value_and_grad(call_var(custom("vjp")), has_aux=True)(2.0), ((6.0, {}), 5.0))


def test_a_value_that_a_backward_rule_sows_is_reaped():
    def pull(ct):
        return jax.vjp(custom("vjp", "bwd"), 2.0)[1](ct)

    same(call_var(pull)(1.0), ((5.0,), {"y": 4.0}))


@pytest.mark.parametrize("mode", ["strict", "clobber"])
def test_reap_and_plant_in_shard_map(mesh, mode):
    def local(x):
        return lax.psum(var(2 * x, name="part", mode=mode), "a")

    g = jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P())
    x = jnp.arange(4.0)
    parts = np.array([[0.0, 2.0], [4.0, 6.0]])
    same(call_var(jax.jit(g))(x), (np.array([4.0, 8.0]), {"part": parts}))
    same(plant_var(jax.jit(g))({"part": jnp.asarray(-parts)}, x), np.array([-4.0, -8.0]))


def test_harvests_work_in_loops_around_and_inside_meshes(mesh):
    double = lambda x: var(2 * x, name="h", mode="append")
    x, parts = jnp.arange(4.0), np.arange(4.0).reshape(2, 2)
    spec = {"mesh": mesh, "in_specs": P("a"), "out_specs": P("a")}
    repeat = lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]
    one, two = 2 * parts, 4 * parts
    inner, outer = jax.shard_map(repeat(double), **spec), repeat(jax.shard_map(double, **spec))
    same(reap_var(inner)(x), {"h": np.stack([one, two], 1)})
    same(reap_var(outer)(x), {"h": np.stack([one, two])})
    same(plant_var(inner)({"h": -jnp.stack([one, two], 1)}, x), -4 * x)
    same(plant_var(outer)({"h": -jnp.stack([one, two])}, x), -4 * x)


def test_reap_and_plant_in_pmap():
    g = jax.pmap(lambda x: var(2 * x, name="x"))
    x = jnp.arange(float(jax.local_device_count()))
    _, reaps = call_var(g)(x)
    same(reaps["x"].reshape(-1), 2 * x)
    same(plant_var(g)(reaps, 0 * x), 2 * x)


def test_reap_in_a_linear_solve():
    def solve(_, b):
        return var(b / 2, name="x")

    g = lambda b: lax.custom_linear_solve(lambda x: 2 * x, b, solve)
    same(call_var(g)(4.0), (2.0, {"x": 2.0}))
    with pytest.raises(tapax.SiteError, match="cannot be edited or perturbed"):
        plant_var(g)({"x": 1.0}, 4.0)


def test_a_train_step_of_flax():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = var(layer(x), name="h", mode="append")
            return x

    net, x = Net(), jnp.ones(2)
    first = net.layers[0](x)
    same(
        reap_var(nnx.jit(lambda m, x: m(x)))(net, x), {"h": np.stack([first, net.layers[1](first)])}
    )


def test_derivatives_of_a_harvest_by_a_closed_over_value_raise_as_in_jax():
    def loss(a, x):
        f = jax.custom_vjp(lambda x: a * x)
        f.defvjp(lambda x: (var(2 * x, name="y"), None), lambda _, ct: (3.0 * ct,))
        return f(x)

    reaped = lambda a, x: call_var(loss)(a, x)[0]
    assert jax.grad(reaped, 1)(3.0, 2.0) == 3.0
    with pytest.raises(Exception, match="custom_vjp function with respect to a closed-over value"):
        jax.grad(reaped)(3.0, 2.0)
