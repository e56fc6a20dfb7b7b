"""`tapax.scope`: names around marks, also in derivatives."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

import tapax
from tests.oracles.closeness import assert_close


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (tapax.sow(ct * jnp.cos(x), "backward"),))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("outer", "inner", "name"),
    [
        (["m"], [], "m/backward"),
        (["m", "n"], [], "m/n/backward"),
        ([], ["m"], "m/backward"),
        (["m"], ["n"], "m/n/backward"),
        (["m"], ["m"], "m/m/backward"),
    ],
)
def test_scopes_around_a_gradient_are_around_the_marks_of_its_custom_rules(
    outer, inner, name, wrap
):
    def within(names, fn, x):
        with contextlib.ExitStack() as stack:
            for each in names:
                stack.enter_context(tapax.scope(each))
            return fn(x)

    loss = lambda x: within(inner, lambda x: jnp.sum(sine(x)), x)
    step = wrap(lambda x: within(outer, jax.grad(loss), x))
    x = jnp.arange(3.0)
    taps = tapax.capture(step)(x)[1]
    assert list(taps.values) == [name]
    assert_close(taps.values[name], jnp.cos(x))


@tapax.scope("layer")
def deepen(x, depth):
    return deepen(jnp.sin(x), depth - 1) if depth else tapax.sow(x, "h")


def test_scope_of_a_recursive_function_is_entered_at_every_depth():
    assert tapax.sites(lambda x: deepen(x, 2))(1.0).names == ["layer/layer/layer/h"]


def test_scope_is_entered_again():
    scope = tapax.scope("a")

    def fn(x):
        with scope:
            x = tapax.sow(x, "h")
            with scope:
                x = tapax.sow(x, "h")
        return tapax.sow(x, "h")

    assert tapax.sites(fn)(1.0).names == ["a/h", "a/a/h", "h"]
