"""Weak types of reaped and planted values in `tapax.compat.oryx`, and unused plants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tapax.compat import oryx
from tapax.compat.oryx import nest, sow_cond
from tests.compat.test_compat_oryx import f, harvest_var, plant_var, reap_var, same, var

HALF = jnp.ones((), jnp.bfloat16)


def is_weak(x):
    """Return whether a value adapts to the type of an array, as a Python number does."""
    return (x * HALF).dtype == jnp.bfloat16 and jax.typeof(x).weak_type


def clobber(x):
    return var(x, name="x", mode="clobber")


PROGRAMS = {
    "straight": lambda x: var(x, name="x"),
    "jit": jax.jit(lambda x: var(x, name="x")),
    "remat": jax.checkpoint(lambda x: var(x, name="x")),
    "nest": lambda x: nest(lambda x: x, scope="s")(var(x, name="x")),
    "clobber": lambda x: clobber(clobber(x) + 1),
    "scan, last": lambda x: lax.scan(lambda c, _: (clobber(c) + 1, None), x, length=3)[0],
    "scan, all": lambda x: lax.scan(
        lambda c, _: (var(c, name="x", mode="append") + 1, None), x, length=3
    )[0],
    "while": lambda x: lax.while_loop(lambda c: c < 3, lambda c: clobber(c) + 1, x),
    "branches": lambda x: lax.cond(
        x > 0, lambda x: var(x, name="x"), lambda x: var(2 * x, name="x"), x
    ),
    "condition": lambda x: sow_cond(x, x > 0, tag="var", name="x"),
    "mapped": lambda x: jax.vmap(lambda _: var(x, name="x"))(jnp.arange(3)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_reaped_value_is_weak_if_the_sown_one_is(name):
    reaped = reap_var(PROGRAMS[name])
    assert is_weak(reaped(1.0)["x"])
    assert is_weak(jax.jit(reaped)(1.0)["x"])
    strong = jnp.float32(1.0)
    found = reaped(strong)["x"]
    assert found.dtype == jnp.float32 and not jax.typeof(found).weak_type
    assert not is_weak(jax.jit(reaped)(strong)["x"])


def test_a_sown_python_number_is_reaped_as_one_would_be():
    found = reap_var(lambda x: var(10, name="i") + var(2.5, name="f") + var(True, name="b"))(0)
    same(found, {"i": 10, "f": 2.5, "b": True})
    assert is_weak(found["i"]) and is_weak(found["f"])
    assert found["b"].dtype == bool and not jax.typeof(found["b"]).weak_type


def test_sows_of_a_weak_and_a_strong_type_give_a_strong_one():
    def g(x):
        var(x, name="x", mode="append")
        return var(jnp.float32(2.0), name="x", mode="append")

    found = reap_var(g)(1.0)["x"]
    same(found, np.array([1.0, 2.0]))
    assert found.dtype == jnp.float32 and not jax.typeof(found).weak_type


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_weak_value_gives_way_to_the_strong_ones_of_its_name(dtype):
    def g(x, strong):
        def step(c, _):
            var(x, name="in a loop", mode="append")
            return var(c, name="in a loop", mode="append"), None

        lax.scan(step, strong, length=2)
        var(1, name="integer", mode="append")
        return var(strong, name="integer", mode="append")

    found = reap_var(g)(1.0, dtype(2.0))
    same(found["in a loop"].astype(float), np.array([[1.0, 2.0]] * 2))
    same(found["integer"].astype(float), np.array([1.0, 2.0]))
    assert {x.dtype for x in found.values()} == {jnp.dtype(dtype)}
    assert not any(jax.typeof(x).weak_type for x in found.values())


def test_sows_of_two_strong_types_are_refused():
    def g(x):
        var(x, name="x", mode="append")
        var(1.0, name="x", mode="append")
        return var(x.astype(jnp.float16), name="x", mode="append")

    with pytest.raises(tapax.SiteError, match=r"'x', .* has values of different types: float32"):
        reap_var(g)(jnp.float32(1.0))


def test_a_weak_reap_is_differentiated_and_mapped():
    g = lambda x: var(x**2, name="x")
    same(jax.grad(lambda x: reap_var(g)(x)["x"])(3.0), 6.0)
    same(jax.vmap(reap_var(g))(jnp.arange(3.0)), {"x": np.array([0.0, 1.0, 4.0])})
    same(jax.jvp(reap_var(g), (3.0,), (1.0,)), ({"x": 9.0}, {"x": 6.0}))


@pytest.mark.parametrize("wrap", [lambda g: g, jax.jit, jax.checkpoint])
def test_a_number_is_planted_where_another_kind_of_number_is_sown(wrap):
    g = wrap(lambda x: x * var(717, name="y"))
    same(plant_var(g)({"y": 15.5}, 2.0), 31.0)
    same(plant_var(g)({"y": 15}, 2.0), 30.0)
    same(plant_var(g)({"y": 1j}, 2.0), 2j)
    same(plant_var(g)({}, 2.0), 1434.0)
    same(jax.jit(plant_var(g))({"y": 15.5}, 2.0), 31.0)
    same(harvest_var(g)({"y": 0.5}, 2.0), (1.0, {}))
    flags = wrap(lambda x: x + var(x > 0, name="flag"))
    same(plant_var(flags)({"flag": 3}, 2.0), 5.0)


def test_a_planted_float_is_not_cut_to_the_integer_that_was_sown():
    g = lambda n: var(n, name="n") / 2
    same(plant_var(g)({"n": 2.5}, jnp.int32(7)), 1.25)
    same(plant_var(lambda n: var(n, name="n"))({"n": 2.5}, jnp.int32(7)), 2.5)
    same(jax.grad(lambda p: plant_var(g)({"n": p}, 7))(2.5), 0.5)


def test_a_planted_number_has_the_type_of_the_value_if_that_can_hold_it():
    g = lambda x: var(x, name="x")
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert plant_var(g)({"x": 2.0}, jnp.ones((), dtype)).dtype == dtype
        assert plant_var(g)({"x": 2}, jnp.ones((), dtype)).dtype == dtype
    assert is_weak(plant_var(g)({"x": 2}, 1.0)) and is_weak(plant_var(g)({"x": 2.0}, 1.0))


def test_types_of_plants_are_those_of_the_harvest_that_takes_the_value():
    def g(x):
        inner = reap_var(lambda: var(7, name="y"))()["y"]
        return inner, var(8, name="y") + x

    inner, out = plant_var(g)({"y": 0.5}, 1.0)
    same((inner, out), (7, 1.5))
    assert inner.dtype.kind == "i"
    other = lambda x: plant_var(lambda: var(7, name="y") / 2)({"y": 3}) + var(8, name="y") * x
    same(plant_var(other)({"y": 0.5}, 1.0), 2.0)


def test_only_plants_that_the_lists_allow_change_types():
    g = lambda x: x + var(7, name="y")
    same(plant_var(g, blocklist=["y"])({"y": 0.5}, 1), 8)
    assert plant_var(g, blocklist=["y"])({"y": 0.5}, 1).dtype.kind == "i"
    assert plant_var(g, allowlist=["z"])({"y": 0.5}, 1).dtype.kind == "i"


def test_a_number_in_a_scope_or_in_a_pytree_is_planted_as_another_kind():
    g = nest(lambda x: x + var({"a": 1, "b": (2, 3)}, name="t")["b"][1], scope="s")
    same(plant_var(g)({"s": {"t": {"a": 1, "b": (2, 0.25)}}}, 1), 1.25)


@pytest.mark.parametrize(
    ("plants", "words"),
    [
        ({"yy": 1.0}, "a value for 'yy', which is ignored, .* tag 'var'. It sows 'y'."),
        ({"a": {"y": 1.0}}, "a value for 'a', which is ignored"),
    ],
)
def test_a_plant_that_nothing_takes_is_ignored_with_a_warning(plants, words):
    with pytest.warns(UserWarning, match=words):
        same(plant_var(f)(plants, 1.0), 3.0)
    with pytest.warns(UserWarning, match=words):
        same(harvest_var(f)(plants, 1.0), (3.0, {"y": 2.0}))


def test_a_plant_that_nothing_in_its_scope_takes_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="a value for 'a/z', .*It sows 'a/y'."):
        same(plant_var(nest(f, scope="a"))({"a": {"z": 1.0}}, 1.0), 3.0)


def test_derivatives_by_plants_that_nothing_takes_are_zero():
    with pytest.warns(UserWarning, match="a value for 'z'"):
        same(jax.grad(plant_var(f))({"z": 1.0, "y": 2.0}, 1.0), {"z": 0.0, "y": 1.0})


def test_the_primitive_of_a_sow_is_not_left_in_a_harvested_program():
    def names(g):
        return {eqn.primitive for eqn in jax.make_jaxpr(g)(1.0).eqns}

    assert oryx.sow_p not in names(reap_var(f))
