"""Arguments and results of a captured function pass through unchanged."""

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7, 1.2])


class Kind(enum.IntEnum):
    A = 1
    B = 2


def test_enumerations_are_static():
    f = lambda x, k: tapax.sow(x, "a") if k is Kind.A else tapax.sow(2 * x, "b")
    captured = tapax.capture(f)
    assert set(captured(X, Kind.A)[1].values) == {"a"}
    assert set(captured(X, Kind.B)[1].values) == {"b"}


def test_dicts_keep_their_order():
    def f(params, **options):
        for name, x in {**params, **options}.items():
            tapax.sow(x, name)
        return {"z": X, "a": X}

    out, taps = tapax.capture(f)({"z": X, "b": X}, y=X, c=X)
    assert taps.sites.names == ["z", "b", "y", "c"]
    assert list(out) == ["z", "a"]


def test_objects_that_change_are_looked_at_again():
    class Settings:
        scale = 2.0

    settings = Settings()
    captured = tapax.capture(lambda x, s: tapax.sow(x * s.scale, "h"))
    assert_close(captured(X, settings)[0], 2 * X)
    settings.scale = 5.0
    assert_close(captured(X, settings)[0], 5 * X)


def test_negative_zero_is_not_zero():
    f = lambda x, z: tapax.sow(x * (1.0 if str(float(z)) == "0.0" else -1.0), "h")
    captured = tapax.capture(f)
    assert_close(captured(X, 0.0)[0], X)
    assert_close(captured(X, -0.0)[0], -X)


def test_results_that_are_not_arrays_come_back_as_they_are():
    f = lambda x: {"n": 2**40, "s": "text", "np": np.arange(2) / 7, "t": jnp.float32, "x": x}
    out, _ = tapax.capture(lambda x: f(tapax.sow(x, "x")))(X)
    assert out["n"] == 2**40
    assert out["np"].dtype == np.float64
    assert out["t"] is jnp.float32


def test_results_that_could_hide_tracers_are_refused():
    class Result:
        def __init__(self, x):
            self.x = x

    with pytest.raises(TypeError, match="returns Result, which is neither an array nor"):
        tapax.capture(lambda x: Result(tapax.sow(x, "h")))(X)


def test_a_pullback_can_be_returned():
    f = lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2)
    (_, pull), taps = tapax.capture(lambda x: jax.vjp(f, x))(X)
    assert_close(pull(jnp.ones(()))[0], 2 * jnp.sin(X) * jnp.cos(X))
    assert_close(taps.values["h"], jnp.sin(X))


def test_objects_with_names_of_ours():
    class Model:
        def __init__(self):
            self._compiled = self._plan = self._fn = None

        def __call__(self, x):
            return tapax.sow(2 * x, "h")

        @tapax.capture
        def method(self, x):
            return tapax.sow(3 * x, "m")

    assert_close(tapax.capture(Model())(X)[0], 2 * X)
    assert_close(Model().method(X)[1].values["m"], 3 * X)
    assert tapax.capture(lambda **kw: tapax.sow(kw["self"], "h"))(self=X)[1].sites.names == ["h"]


def test_sites_of_shapes_alone():
    table = tapax.sites(lambda x: tapax.sow(2 * x, "h"))(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert table["h"].shape == (3,)


def test_python_numbers_stay_python_numbers():
    f = lambda x: sum(x for _ in range(tapax.sow(3, "n")))
    out, taps = tapax.capture(f)(X)
    assert_close(out, 3 * X)
    assert int(taps.values["n"]) == 3


def test_partial_of_a_jitted_function_keeps_its_options():
    fn = jax.jit(lambda x, n: [tapax.sow(x, f"h{i}") for i in range(n)], static_argnums=1)
    _, taps = tapax.capture(functools.partial(fn, n=2))(X)
    assert set(taps.values) == {"h0", "h1"}


def test_static_arguments_of_a_jitted_function_stay_what_they_are():
    @jax.tree_util.register_pytree_node_class
    class Config:
        def __init__(self, table, tag):
            self.table, self.tag = table, tag

        def tree_flatten(self):
            return (self.table, self.tag), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def f(x, config, like):
        assert isinstance(config.table, np.ndarray) and isinstance(config.tag, bytearray)
        assert isinstance(like, jax.ShapeDtypeStruct)
        return tapax.sow(x * int(config.table[1]), "h")

    x = jnp.arange(3.0)
    given = Config(np.array([2, 5]), bytearray(b"tag")), jax.ShapeDtypeStruct((2,), jnp.float32)
    assert_close(tapax.capture(f)(x, *given)[1].values["h"], 5 * x)
