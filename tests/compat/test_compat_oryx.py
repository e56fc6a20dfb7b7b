"""`tapax.compat.oryx`: what oryx documents of `harvest`, against numbers worked out by hand."""

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tapax
from tapax.compat import oryx
from tapax.compat.oryx import call_and_reap, harvest, nest, plant, reap, sow, sow_cond
from tests.oracles.closeness import assert_close

var = functools.partial(sow, tag="var")
reap_var = functools.partial(reap, tag="var")
plant_var = functools.partial(plant, tag="var")
harvest_var = functools.partial(harvest, tag="var")
call_var = functools.partial(call_and_reap, tag="var")


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close(found, expected)


def close(found, expected):
    """As `same`, for numbers of 32 bits that went through many operations."""
    assert_close(found, expected, 1e-4)


def f(x):
    y = var(x + 1.0, name="y")
    return y + 1.0


# --- what the documentation says ----------------------------------------------------------------


def test_outside_of_a_harvest_sow_is_the_identity_and_binds_nothing():
    tree = {"a": 1.0, "b": (jnp.ones(2), "no array")}
    assert var(tree, name="t") is tree
    same(f(1.0), 3.0)
    plain = jax.make_jaxpr(lambda x: x + 1.0 + 1.0)(1.0)
    assert str(jax.make_jaxpr(f)(1.0)) == str(plain)
    assert str(jax.make_jaxpr(nest(f, scope="s"))(1.0)) == str(plain)


@pytest.mark.parametrize("x", [1.0, 5.0])
def test_the_documented_example(x):
    same(harvest_var(f)({"y": 0.0}, x), (1.0, {}))
    same(harvest_var(f)({}, x), (x + 2, {"y": x + 1}))
    same(plant_var(f)({"y": 0.0}, x), 1.0)
    same(plant_var(f)({}, x), x + 2)
    same(reap_var(f)(x), {"y": x + 1})
    same(call_var(f)(x), (x + 2, {"y": x + 1}))


def test_what_is_not_returned_and_what_is_constant_is_reaped_and_planted():
    def g(x):
        var(x * 2, name="side")
        return x + var(10.0, name="c")

    same(harvest_var(g)({}, 1.0), (11.0, {"side": 2.0, "c": 10.0}))
    same(harvest_var(g)({"c": 20, "side": 0.0}, 1.0), (21.0, {}))


def test_a_tag_is_a_namespace_and_exclusive_takes_the_others_out():
    def g(x):
        return sow(x + 1, tag="a", name="v") * sow(x + 2, tag="b", name="v")

    same(reap(g, tag="a")(1.0), {"v": 2.0})
    same(plant(g, tag="b")({"v": 10.0}, 1.0), 20.0)
    both = reap(call_and_reap(g, tag="a"), tag="b")
    same(both(1.0), {"v": 3.0})
    same(harvest(harvest(g, tag="a"), tag="b")({"v": 10.0}, {"v": 5.0}, 1.0), ((50.0, {}), {}))
    same(reap(call_and_reap(g, tag="a", exclusive=True), tag="b")(1.0), {})
    same(reap(plant(g, tag="a", exclusive=True), tag="b")({}, 1.0), {})


class Kind(enum.Enum):
    TAG = "tag"


@pytest.mark.parametrize("tag", [1, (1.5, "a"), Kind.TAG, "a/b:c"])
def test_a_tag_is_any_hashable(tag):
    g = lambda x: sow(x, tag=tag, name="x") + sow(2 * x, tag=repr(tag), name="x")
    same(reap(g, tag=tag)(1.0), {"x": 1.0})
    same(plant(g, tag=tag)({"x": 5.0}, 1.0), 7.0)


def test_the_lists_are_of_names():
    g = lambda x: var(x, name="x") + 10 * var(x, name="y")
    same(reap_var(g, blocklist=["x"])(1.0), {"y": 1.0})
    same(reap_var(g, allowlist=["x"])(1.0), {"x": 1.0})
    same(reap_var(g, allowlist=["x"], blocklist=["x"])(1.0), {})
    same(plant_var(g, blocklist=["x"])({"x": 2.0, "y": 3.0}, 1.0), 31.0)
    same(plant_var(g, allowlist=["x"])({"x": 2.0, "y": 3.0}, 1.0), 12.0)
    # What is not planted can still be reaped.
    same(reap_var(plant_var(g, allowlist=["x"]))({"x": 2.0}, 1.0), {"y": 1.0})


def test_a_second_harvest_of_the_tag_finds_nothing():
    same(harvest_var(harvest_var(f))({}, {}, 1.0), ((3.0, {"y": 2.0}), {}))
    same(reap_var(reap_var(f))(1.0), {})
    same(reap_var(reap_var(f, blocklist=["y"]))(1.0), {})
    with pytest.raises(tapax.SiteError, match="nothing is sown"):
        harvest_var(harvest_var(f))({"y": 1.0}, {}, 1.0)
    _, taps = tapax.capture(reap_var(f))(1.0)
    assert not taps.values


def test_planting_and_reaping_apart_is_harvesting():
    g = lambda x: var(x, name="x") * var(3 * x, name="y")
    expected = 10.0, {"y": 3.0}
    same(call_var(plant_var(g))({"x": 10.0 / 3}, 1.0), expected)
    same(harvest_var(g)({"x": 10.0 / 3}, 1.0), expected)


def test_a_sown_pytree_is_reaped_and_planted_as_one():
    def g(x):
        t = var({"a": x, "b": [2 * x, 3 * x]}, name="t")
        var((), name="empty")
        return t["a"] + 10 * t["b"][0] + 100 * t["b"][1]

    out, reaps = call_var(g)(1.0)
    same(reaps, {"t": {"a": 1.0, "b": [2.0, 3.0]}, "empty": ()})
    same(plant_var(g)({"t": {"a": 5.0, "b": [6.0, 7.0]}}, 1.0), 765.0)


def test_a_random_key_can_be_sown_and_planted():
    g = lambda k: jax.random.normal(var(k, name="k"), (3,))
    one, two = jax.random.key(1), jax.random.key(2)
    assert reap_var(g)(one)["k"] == one
    same(plant_var(g)({"k": two}, one), g(two))


@pytest.mark.parametrize("key", [2.0, jax.random.key(0)], ids=["number", "key"])
def test_the_key_is_tied_to_the_value(key):
    g = lambda x, key: var(x, name="x", key=key) ** 2
    same(g(3.0, key), 9.0)
    same(harvest_var(g)({}, 3.0, key), (9.0, {"x": 3.0}))
    same(jax.grad(g)(3.0, key), 6.0)
    jaxpr = jax.make_jaxpr(g)(3.0, key).jaxpr
    (barrier,) = (e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier")
    assert set(jaxpr.invars) <= set(barrier.invars)


# --- nest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda g: g, jax.jit], ids=["plain", "jit"])
def test_nest_puts_names_into_a_dict(wrap):
    g = wrap(nest(wrap(f), scope="a"))
    same(harvest_var(g)({}, 1.0), (3.0, {"a": {"y": 2.0}}))
    same(harvest_var(g)({"a": {"y": 0.0}}, 1.0), (1.0, {}))
    same(harvest_var(g)({"a": {}}, 1.0), (3.0, {"a": {"y": 2.0}}))


def test_names_may_be_the_same_in_different_scopes_also_of_one_jitted_function():
    layer = jax.jit(lambda x: var(2 * x, name="h"))

    def g(x):
        for i in range(2):
            x = nest(nest(layer, scope="in"), scope=f"l{i}")(x)
        return var(x, name="h")

    expected = {"l0": {"in": {"h": 2.0}}, "l1": {"in": {"h": 4.0}}, "h": 4.0}
    same(reap_var(g)(1.0), expected)
    layer(1.0)
    same(reap_var(g)(1.0), expected)
    same(
        harvest_var(g)({"l1": {"in": {"h": 7.0}}}, 1.0), (7.0, {"l0": {"in": {"h": 2.0}}, "h": 7.0})
    )
    same(reap_var(g, blocklist=["l0"])(1.0), {"l1": {"in": {"h": 4.0}}, "h": 4.0})


def test_a_harvest_in_a_scope_knows_nothing_of_it():
    def g(x):
        out, reaps = call_var(f)(x)
        return sow(out + reaps["y"], tag="b", name="z")

    same(call_and_reap(nest(g, scope="s"), tag="b")(1.0), (5.0, {"s": {"z": 5.0}}))
    same(reap(nest(lambda x: plant_var(f)({"y": x}, x), scope="s"), tag="b")(1.0), {})


def test_jt_scopes_and_names_do_not_get_into_each_others_way():
    def g(x):
        with tapax.scope("outer"):
            x = var(x + 1, name="a/b", mode="clobber")
        return tapax.sow(var(2 * x, name="a/b", mode="clobber"), "mine")

    same(reap_var(g)(1.0), {"a/b": 4.0})
    _, taps = tapax.capture(call_var(g))(1.0)
    same(taps.values, {"mine": 4.0})
    assert "var/h" in tapax.capture(lambda x: var(x, name="h"))(1.0)[1].values


# --- modes --------------------------------------------------------------------------------------


def twice(mode):
    def g(x):
        x = var(x, name="x", mode=mode)
        return var(x + 1, name="x", mode=mode)

    return g


def test_strict_raises_for_a_name_sown_twice():
    with pytest.raises(ValueError, match=r"'x' is sown at .*:\d+, and again at .*:\d+: in mode"):
        reap_var(twice("strict"))(1.0)
    with pytest.raises(ValueError, match="it can be planted but once"):
        plant_var(twice("strict"))({"x": 1.0}, 1.0)
    same(plant_var(twice("strict"))({}, 1.0), 2.0)
    same(reap(twice("strict"), tag="other")(1.0), {})


def test_clobber_keeps_the_last_and_plants_all():
    same(harvest_var(twice("clobber"))({}, 1.0), (2.0, {"x": 2.0}))
    same(harvest_var(twice("clobber"))({"x": 5.0}, 1.0), (5.0, {}))
    shapes = lambda x: var(
        jnp.stack([var(x, name="x", mode="clobber")] * 2), name="x", mode="clobber"
    )
    same(reap_var(shapes)(1.0), {"x": np.ones(2)})


def test_append_stacks_in_the_order_of_the_program():
    same(reap_var(twice("append"))(1.0), {"x": np.array([1.0, 2.0])})
    with pytest.raises(tapax.SiteError, match="in mode 'append' it can be planted but once"):
        plant_var(twice("append"))({"x": jnp.zeros(2)}, 1.0)

    def g(x):
        var(x, name="x", mode="append")
        lax.scan(lambda c, t: (c, var(t * x, name="x", mode="append")), 0.0, jnp.arange(1.0, 4.0))
        return var(-x, name="x", mode="append")

    same(reap_var(g)(2.0), {"x": np.array([2.0, 2.0, 4.0, 6.0, -2.0])})
    same(reap_var(lambda x: var(x, name="x", mode="append"))(1.0), {"x": 1.0})


def test_append_twice_in_one_body():
    def body(c, t):
        c = var(c + t, name="x", mode="append")
        return var(10 * c, name="x", mode="append"), None

    g = lambda x: lax.scan(body, x, jnp.arange(2.0))[0]
    same(reap_var(g)(1.0), {"x": np.array([[1.0, 10.0], [11.0, 110.0]])})


@pytest.mark.parametrize("modes", [("strict", "clobber"), ("append", "strict")])
def test_a_name_has_one_mode(modes):
    g = lambda x: [var(x, name="x", mode=m) for m in modes]
    with pytest.raises(tapax.SiteError, match=f"in mode '{modes[0]}', and at .* '{modes[1]}'"):
        reap_var(g)(1.0)
    same(reap(g, tag="other")(1.0), {})


# --- loops --------------------------------------------------------------------------------------


def scanned(mode, **options):
    def body(carry, x):
        x = var(x + carry, name="x", mode=mode)
        return x, x

    return lambda init: lax.scan(body, init, jnp.arange(5.0), **options)


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


def test_nested_scans():
    def g(x):
        inner = lambda c, t: (c, var(x * t, name="x", mode="append"))
        outer = lambda c, t: lax.scan(inner, c, t * jnp.arange(3.0))
        return lax.scan(outer, 0.0, jnp.arange(1.0, 3.0))[1]

    table = np.array([[0.0, 2.0, 4.0], [0.0, 4.0, 8.0]])
    same(harvest_var(g)({}, 2.0), (table, {"x": table}))
    same(plant_var(g)({"x": -table}, 2.0), -table)


def test_strict_in_a_scan_raises():
    with pytest.raises(
        ValueError, match=r"'x', sown at .*is in a scan loop, where it cannot be reap"
    ):
        reap_var(scanned("strict"))(1.0)
    with pytest.raises(ValueError, match="is in a scan loop, where it cannot be planted in mode"):
        plant_var(scanned("strict"))({"x": 1.0}, 1.0)


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
    with pytest.raises(ValueError, match=f"while loop, where it cannot be reaped in mode '{mode}'"):
        reap_var(looped(mode))((0, 0.0, 0.0))
    with pytest.raises(ValueError, match=f"while loop, .* planted in mode '{mode}'. .* 'clobber'"):
        plant_var(looped(mode))({"x": 4.0}, (0, 0.0, 0.0))
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


# --- branches -----------------------------------------------------------------------------------


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


def test_branches_may_sow_different_names():
    def g(p, x):
        yes = lambda x: var(x, name="x") + 1
        no = lambda x: var(var(10 * x, name="y") + 1, name="z") + 2
        return lax.cond(p, yes, no, x)

    same(call_var(g)(jnp.array(True), 1.0), (2.0, {"x": 1.0, "y": 0.0, "z": 0.0}))
    same(call_var(g)(jnp.array(False), 1.0), (13.0, {"x": 0.0, "y": 10.0, "z": 11.0}))
    same(plant_var(g)({"y": 5.0}, jnp.array(True), 1.0), 2.0)
    same(plant_var(g)({"y": 5.0}, jnp.array(False), 1.0), 8.0)


def test_two_conditionals_are_two_sows():
    def g(p, x):
        x = lax.cond(p, lambda x: var(x, name="x"), lambda x: x, x)
        return lax.cond(p, lambda x: x, lambda x: var(x, name="x"), x)

    with pytest.raises(tapax.SiteError, match="and again at"):
        reap_var(g)(jnp.array(True), 1.0)
    # `vmap` has made both a selection, and one: it is seen only where both ran.
    apart = lambda p, q, x: (
        lax.cond(p, lambda x: var(x, name="x"), lambda x: x, x),
        lax.cond(q, lambda x: x, lambda x: var(x + 1, name="x"), x),
    )
    p, q = jnp.array([True, True, False]), jnp.array([True, False, False])
    same(reap_var(jax.vmap(apart, (0, 0, None)))(p, q, 1.0), {"x": np.array([1.0, np.nan, 2.0])})


@pytest.mark.parametrize("outer", [True, False], ids=["vmap(reap)", "reap(vmap)"])
def test_conditionals_in_conditionals(outer):
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


def test_the_values_of_branches_have_one_type():
    def g(p, x):
        yes = lambda x: var(x, name="x") + 1
        return lax.cond(p, yes, lambda x: jnp.sum(var(jnp.stack([x, x]), name="x")), x)

    with pytest.raises(ValueError, match=r"'x', .*: float32\[2?\] and float32\[2?\]. Give one"):
        reap_var(g)(jnp.array(True), jnp.float32(1.0))


# --- transformations ----------------------------------------------------------------------------


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
def test_vmap(inner):
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
    # Planted is a constant, so nothing goes back through it.
    same(plant_var(jax.grad(g))({"y": 2.0}, 5.0), 0.0)
    steps = plant_var(lambda x: jnp.sum(scanned("append")(x)[1] * jnp.arange(5.0)))
    same(jax.grad(steps)({"x": jnp.ones(5)}, 1.0), {"x": np.arange(5.0)})


def test_checkpoint():
    @jax.checkpoint
    def inner(x):
        y = var(x * 2, name="y")
        return y**2

    for g in (inner, jax.checkpoint(lambda x: inner(x))):
        same(reap_var(g)(2.0), {"y": 4.0})
        same(harvest_var(jax.grad(g))({}, 2.0), (16.0, {"y": 4.0}))
        same(jax.grad(plant_var(g))({"y": 3.0}, 2.0), {"y": 6.0})


def custom(kind, in_rule=""):
    """The sine, with a derivative that is not its own, sowing somewhere."""
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
def test_custom_derivatives(kind):
    g = custom(kind)
    same(call_var(g)(2.0), (4 + np.sin(2.0), {"y": 4.0}))
    same(plant_var(g)({"y": 1.0}, 2.0), 1 + np.sin(2.0))
    same(jax.grad(lambda x: call_var(g)(x)[0])(2.0), 5.0)
    same(call_var(jax.grad(g))(2.0)[0], 5.0)
    same(jax.grad(plant_var(g), argnums=1)({"y": 1.0}, 2.0), 5.0)
    with pytest.raises(tapax.SiteError, match="no derivative by what it is"):
        jax.grad(plant_var(g))({"y": 1.0}, 2.0)
    rule = custom(kind, "rule")
    same(reap_var(jax.value_and_grad(rule))(2.0), {"y": 4.0})
    same(plant_var(jax.value_and_grad(rule))({"y": 1.0}, 2.0), (3.0, 5.0))
    assert reap_var(rule)(2.0) == {}


def test_the_backward_rule():
    def pull(ct):
        return jax.vjp(custom("vjp", "bwd"), 2.0)[1](ct)

    same(call_var(pull)(1.0), ((5.0,), {"y": 4.0}))


@pytest.mark.parametrize("mode", ["strict", "clobber"])
def test_shard_map(mesh, mode):
    def local(x):
        return lax.psum(var(2 * x, name="part", mode=mode), "a")

    g = jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P())
    x = jnp.arange(4.0)
    parts = np.array([[0.0, 2.0], [4.0, 6.0]])
    same(call_var(jax.jit(g))(x), (np.array([4.0, 8.0]), {"part": parts}))
    same(plant_var(jax.jit(g))({"part": jnp.asarray(-parts)}, x), np.array([-4.0, -8.0]))


def test_loops_and_meshes(mesh):
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


def test_pmap():
    g = jax.pmap(lambda x: var(2 * x, name="x"))
    x = jnp.arange(float(jax.local_device_count()))
    _, reaps = call_var(g)(x)
    same(reaps["x"].reshape(-1), 2 * x)
    same(plant_var(g)(reaps, 0 * x), 2 * x)


def test_linear_solve():
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


# --- random programs ----------------------------------------------------------------------------


def generate(rng, depth=2):
    """A list of operations on a number; bodies are lists of them, the branches of one kind."""
    ops = []
    for _ in range(rng.integers(1, 4)):
        kind = rng.choice(["sow", "sow", "scan", "cond", "jit", "remat", "nest"])
        factor = float(rng.uniform(0.5, 1.5))
        if kind == "sow" or depth == 0:
            ops.append(("sow", str(rng.choice(["a0", "a1", "c0", "c1"])), factor))
        elif kind == "scan":
            ops.append(("scan", int(rng.integers(1, 4)), generate(rng, depth - 1)))
        elif kind == "cond":
            body = generate(rng, depth - 1)
            ops.append(("cond", float(rng.uniform(0.5, 1.5)), body, scaled(body, -0.7)))
        else:
            ops.append((str(kind), generate(rng, depth - 1)))
    return ops


def scaled(ops, by):
    """The same operations with other numbers."""
    is_sow = lambda op: op[0] == "sow"
    return [(*op[:2], op[2] * by) if is_sow(op) else op for op in ops]


def traced(ops, x):
    for kind, *rest in ops:
        body = functools.partial(traced, rest[-1])
        if kind == "sow":
            mode = {"a": "append", "c": "clobber"}[rest[0][0]]
            x = var(jnp.sin(x * rest[1]) + 1, name=rest[0], mode=mode)
        elif kind == "scan":
            x = lax.scan(lambda c, _, body=body: (body(c), None), x, length=rest[0])[0]
        elif kind == "cond":
            x = lax.cond(x > rest[0], functools.partial(traced, rest[1]), body, x)
        else:
            wrap = {"jit": jax.jit, "remat": jax.checkpoint}.get(kind)
            x = (wrap(body) if wrap else nest(body, scope="s"))(x)
    return x


def by_hand(ops, x, plants=None):
    """What a program returns and sows: clobbered values, and a list of parts for appended ones.

    A part is a number, or the list that a loop makes.
    """
    reaps = {}

    def add(more, scope=()):
        for name, new in more.items():
            known = reaps.setdefault((*scope, *name), [])
            known[:] = known + new if name[-1][0] == "a" else new

    for kind, *rest in ops:
        if kind == "sow":
            x = np.sin(x * rest[1]) + 1
            x = plants[rest[0]].pop(0) if plants and rest[0] in plants else x
            add({(rest[0],): [x]})
        elif kind == "scan":
            steps = []
            for _ in range(rest[0]):
                x, more = by_hand(rest[1], x, plants)
                steps.append(more)
            last = steps[-1].items()
            each = {n: [[joined(s[n]) for s in steps]] if n[-1][0] == "a" else v for n, v in last}
            add(each)
        elif kind == "cond":
            x, more = by_hand(rest[1] if x > rest[0] else rest[2], x, plants)
            # A conditional is one place.
            add({n: [np.asarray(joined(v))] if is_one(v) else v for n, v in more.items()})
        else:
            x, more = by_hand(rest[0], x, plants)
            add(more, ("s",) if kind == "nest" else ())
    return x, reaps


def is_one(parts):
    return len(parts) == 1 and not isinstance(parts[0], list)


def joined(parts):
    if len(parts) == 1:
        return parts[0]
    return [x for part in parts for x in (part if isinstance(part, list) else [part])]


def count(ops, name):
    """In how many places a name is sown."""
    return sum(op[1] == name if op[0] == "sow" else count(op[-1], name) for op in ops)


def nested(reaps):
    tree = {}
    for (*scopes, name), parts in reaps.items():
        inner = tree
        for scope in scopes:
            inner = inner.setdefault(scope, {})
        inner[name] = np.array(joined(parts))
    return tree


@pytest.mark.parametrize("seed", range(5))
def test_a_random_program(seed):
    rng = np.random.default_rng(seed)
    ops = generate(rng)
    out, reaps = by_hand(ops, 0.8)
    program = functools.partial(traced, ops)
    try:
        reaps = nested(reaps)
    except ValueError:  # what is appended is of different lengths
        with pytest.raises(tapax.SiteError, match="has values of different types"):
            reap_var(program)(0.8)
        return
    close(call_var(program)(0.8), (out, reaps))
    close(call_var(jax.grad(program))(0.8), (jax.grad(program)(0.8), reaps))


@pytest.mark.parametrize("seed", range(5))
def test_plants_in_a_random_program(seed):
    rng = np.random.default_rng(seed)
    ops = [op for op in generate(rng) if "nest" not in repr(op)]
    _, reaps = by_hand(ops, 0.8)
    program = plant_var(functools.partial(traced, ops))
    for (name,), parts in reaps.items():
        value = np.array(joined(parts)) if name[0] == "c" or count(ops, name) == 1 else 0.0
        value = rng.uniform(0.5, 1.5, np.shape(value))
        plants = {name: jnp.asarray(value)}
        if name[0] == "a" and count(ops, name) > 1:
            with pytest.raises(tapax.SiteError, match="planted but once"):
                program(plants, 0.8)
            continue
        due = list(value.reshape(-1)) if name[0] == "a" else [value] * 1000
        close(program(plants, 0.8), by_hand(ops, 0.8, {name: due})[0])
        assert name[0] == "c" or not due


# --- bad input ----------------------------------------------------------------------------------


def collide(x):
    return nest(f, scope="y")(var(x, name="y"))


def of_two_structures(x):
    var(x, name="t", mode="clobber")
    var((x, x), name="t", mode="clobber")


def in_predicate(x):
    return lax.while_loop(lambda c: var(c, name="p", mode="clobber") < 3, lambda c: c + 1, x)


BAD = {
    "mode": (lambda: var(1.0, name="x", mode="sum"), "mode='sum', but a mode is 'strict', "),
    "cond mode": (lambda: var(1.0, name="x", mode="cond_clobber"), "Use `sow_cond` for that."),
    "mode of sow_cond": (
        lambda: sow_cond(1.0, True, tag="var", name="x", mode="append"),
        "has no mode other than 'cond_clobber'",
    ),
    "name": (lambda: var(1.0, name=3), "`name` must be a string, but is 3 of type int."),
    "tag": (lambda: sow(1.0, name="x", tag=[1]), "unhashable"),
    "tag of reap": (lambda: reap(f, tag=[1]), "unhashable"),
    "scope": (lambda: nest(f, scope=1), "`scope` must be a string, but is 1 of type int."),
    "no function": (lambda: reap_var(3), "takes a function, but was given 3"),
    "list": (lambda: reap_var(f, allowlist="y"), r"is the string 'y'. Write \['y'\]."),
    "plants": (lambda: plant_var(f)(1.0), "is a dict of values by name, but it is of type float."),
    "unknown plant": (
        lambda: plant_var(f)({"yy": 1.0}, 1.0),
        "`plants` has a value for 'yy', but nothing is sown under that name with the tag 'var'. "
        "The names that are: 'y'.",
    ),
    "unknown scope": (lambda: plant_var(f)({"a": {"y": 1.0}}, 1.0), "a value for 'a'"),
    "unknown in scope": (
        lambda: plant_var(nest(f, scope="a"))({"a": {"z": 1.0}}, 1.0),
        "a value for 'a/z', .*The names that are: 'a/y'.",
    ),
    "shape": (
        lambda: plant_var(f)({"y": jnp.ones(2)}, 1.0),
        r"The plant for 'y', sown at .*:\d+, has shape \[2\], but the value has shape \[\].",
    ),
    "dtype": (
        lambda: plant_var(f)({"y": jnp.ones((), jnp.int8)}, 1.0),
        "is of type int8, but the value is float.*Cast the plant.",
    ),
    "structure": (lambda: plant_var(f)({"y": (1.0,)}, 1.0), "has the structure PyTreeDef"),
    "steps": (
        lambda: plant_var(scanned("append"))({"x": jnp.ones(4)}, 1.0),
        r"has shape \[4\], but the value has shape \[5\].",
    ),
    "scope and name": (
        lambda: reap_var(collide)(1.0),
        "'y/y', .* is in a scope of the name of 'y'",
    ),
    "two structures": (lambda: reap_var(of_two_structures)(1.0), "'t' .* with the structure"),
    "predicate": (lambda: reap_var(in_predicate)(0.0), "is in the predicate of a while loop"),
    "predicate planted": (lambda: plant_var(in_predicate)({"p": 0.0}, 0.0), "predicate"),
}


@pytest.mark.parametrize(("call", "words"), BAD.values(), ids=BAD)
def test_bad_input(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_an_error_leaves_nothing_behind():
    def g(x):
        raise ValueError("intended")

    with pytest.raises(ValueError, match="intended"):
        reap_var(nest(g, scope="s"))(1.0)
    same(reap_var(f)(1.0), {"y": 2.0})


def test_what_is_opaque_raises_unless_it_is_left_out():
    g = lambda x: lax.reduce(x, 0.0, lambda a, b: var(a, name="a") + b, (0,))
    with pytest.raises(
        tapax.SiteError, match=r"'a', sown at .*:\d+, is in a call of 'reduce', which"
    ):
        reap_var(g)(jnp.arange(3.0))
    same(call_var(g, blocklist=["a"])(jnp.arange(3.0)), (3.0, {}))


def test_work_is_linear_in_the_depth_of_nesting():
    def nested(depth):
        g = lambda x: jnp.sin(var(jnp.sin(x), name="h", mode="clobber"))
        for _ in range(depth):
            g = jax.jit(lambda x, g=g: g(x) + 1)
        return g

    sizes = [str(jax.make_jaxpr(reap_var(nested(d)))(1.0)).count("=") for d in (2, 4, 8)]
    assert sizes[2] - sizes[1] <= 2 * (sizes[1] - sizes[0]) + 4


def test_the_public_names():
    assert set(oryx.__all__) == {
        "call_and_reap", "harvest", "nest", "plant", "reap", "sow", "sow_cond",
    }  # fmt: skip
