"""`tapax.compat.oryx` does what oryx documents for `harvest`, against numbers by hand."""

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

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
    """Compare like `same`, with a tolerance for 32-bit numbers after many operations."""
    assert_close(found, expected, 1e-4)


def f(x):
    y = var(x + 1.0, name="y")
    return y + 1.0


def scanned(mode, **options):
    def body(carry, x):
        x = var(x + carry, name="x", mode=mode)
        return x, x

    return lambda init: lax.scan(body, init, jnp.arange(5.0), **options)


def test_outside_of_a_harvest_sow_is_the_identity_and_binds_nothing():
    tree = {"a": 1.0, "b": (jnp.ones(2), "no array")}
    assert var(tree, name="t") is tree
    same(f(1.0), 3.0)
    plain = jax.make_jaxpr(lambda x: x + 1.0 + 1.0)(1.0)
    assert str(jax.make_jaxpr(f)(1.0)) == str(plain)
    assert str(jax.make_jaxpr(nest(f, scope="s"))(1.0)) == str(plain)


@pytest.mark.parametrize("x", [1.0, 5.0])
def test_the_example_of_oryxs_documentation_runs(x):
    same(harvest_var(f)({"y": 0.0}, x), (1.0, {}))
    same(harvest_var(f)({}, x), (x + 2, {"y": x + 1}))
    same(plant_var(f)({"y": 0.0}, x), 1.0)
    same(plant_var(f)({}, x), x + 2)
    same(reap_var(f)(x), {"y": x + 1})
    same(call_var(f)(x), (x + 2, {"y": x + 1}))


def test_unused_and_constant_values_are_reaped_and_planted():
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


def test_lists_allow_and_block_names():
    g = lambda x: var(x, name="x") + 10 * var(x, name="y")
    same(reap_var(g, blocklist=["x"])(1.0), {"y": 1.0})
    same(reap_var(g, allowlist=["x"])(1.0), {"x": 1.0})
    same(reap_var(g, allowlist=["x"], blocklist=["x"])(1.0), {})
    same(plant_var(g, blocklist=["x"])({"x": 2.0, "y": 3.0}, 1.0), 31.0)
    same(plant_var(g, allowlist=["x"])({"x": 2.0, "y": 3.0}, 1.0), 12.0)
    # A harvest can reap values that are not planted.
    same(reap_var(plant_var(g, allowlist=["x"]))({"x": 2.0}, 1.0), {"y": 1.0})


def test_a_second_harvest_of_the_tag_finds_nothing():
    same(harvest_var(harvest_var(f))({}, {}, 1.0), ((3.0, {"y": 2.0}), {}))
    same(reap_var(reap_var(f))(1.0), {})
    same(reap_var(reap_var(f, blocklist=["y"]))(1.0), {})
    with pytest.warns(UserWarning, match="sows no such name"):
        same(harvest_var(harvest_var(f))({"y": 1.0}, {}, 1.0), ((3.0, {"y": 2.0}), {}))
    with pytest.warns(UserWarning, match="The function has no sites"):
        _, taps = tapax.capture(reap_var(f))(1.0)
    assert not taps.values


def test_a_plant_and_a_reap_together_are_a_harvest():
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


def test_scopes_and_names_of_tapax_do_not_change_those_of_a_harvest():
    def g(x):
        with tapax.scope("outer"):
            x = var(x + 1, name="a/b", mode="clobber")
        return tapax.sow(var(2 * x, name="a/b", mode="clobber"), "mine")

    same(reap_var(g)(1.0), {"a/b": 4.0})
    _, taps = tapax.capture(call_var(g))(1.0)
    same(dict(taps.values), {"mine": 4.0})
    assert "var/h" in tapax.capture(lambda x: var(x, name="h"))(1.0)[1].values


def twice(mode):
    def g(x):
        x = var(x, name="x", mode=mode)
        return var(x + 1, name="x", mode=mode)

    return g


def test_strict_raises_for_a_name_sown_twice():
    again = r": x. It is sown at .*:\d+, and again at .*:\d+, in mode 'strict'. Rename one of them"
    with pytest.raises(ValueError, match=f"Variable has already been reaped{again}"):
        reap_var(twice("strict"))(1.0)
    with pytest.raises(ValueError, match=f"Variable has already been planted{again}"):
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
    with pytest.raises(tapax.SiteError, match=r"already been planted: x\. .* 'append'"):
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


def collide(x):
    return nest(f, scope="y")(var(x, name="y"))


def of_two_structures(x):
    var(x, name="t", mode="clobber")
    var((x, x), name="t", mode="clobber")


def in_predicate(x):
    return lax.while_loop(lambda c: var(c, name="p", mode="clobber") < 3, lambda c: c + 1, x)


BAD = {
    "mode": (
        lambda: var(1.0, name="x", mode="sum"),
        "Invalid mode: sum. `sow` of 'x' takes 'strict', 'clobber' or 'append'.",
    ),
    "cond mode": (
        lambda: var(1.0, name="x", mode="cond_clobber"),
        "For 'cond_clobber' mode, use `sow_cond`: `sow` of 'x' takes no condition.",
    ),
    "mode of sow_cond": (
        lambda: sow_cond(1.0, True, tag="var", name="x", mode="append"),
        "`sow_cond` only supports 'cond_clobber' mode, but for 'x' `mode` is 'append'.",
    ),
    "name": (lambda: var(1.0, name=3), "`name` must be a string, but is 3 of type int."),
    "tag": (lambda: sow(1.0, name="x", tag=[1]), "unhashable"),
    "tag of reap": (lambda: reap(f, tag=[1]), "unhashable"),
    "scope": (lambda: nest(f, scope=1), "`scope` must be a string, but is 1 of type int."),
    "no function": (lambda: reap_var(3), "takes a function, but was given 3"),
    "list": (lambda: reap_var(f, allowlist="y"), r"is the string 'y'. Write \['y'\]."),
    "plants": (
        lambda: plant_var(f)(1.0),
        "must be a dict of values by name, but is of type float.",
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
        "'y/y', .* is in a scope with the name of the value 'y'",
    ),
    "two structures": (lambda: reap_var(of_two_structures)(1.0), "'t' .* with the structure"),
    "predicate": (lambda: reap_var(in_predicate)(0.0), "is in the predicate of a while loop"),
    "predicate planted": (lambda: plant_var(in_predicate)({"p": 0.0}, 0.0), "predicate"),
}


@pytest.mark.parametrize(("call", "words"), BAD.values(), ids=BAD)
def test_bad_input_of_a_harvest_raises(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_an_error_leaves_nothing_behind():
    def g(x):
        raise ValueError("intended")

    with pytest.raises(ValueError, match="intended"):
        reap_var(nest(g, scope="s"))(1.0)
    same(reap_var(f)(1.0), {"y": 2.0})


def test_opaque_calls_raise_unless_they_are_left_out():
    g = lambda x: lax.reduce(x, 0.0, lambda a, b: var(a, name="a") + b, (0,))
    with pytest.raises(
        tapax.SiteError, match=r"'a', sown at .*:\d+, cannot be reaped, .* in a call of 'reduce'"
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


def test_the_public_names_are_those_of_oryx():
    assert set(oryx.__all__) == {
        "call_and_reap", "harvest", "nest", "plant", "reap", "sow", "sow_cond",
    }  # fmt: skip
