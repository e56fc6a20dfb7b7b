"""Bad input raises errors in whole sentences that name site, line, cause and fix."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapax

X = jnp.array([1.0, 2.0])


def net(x):
    with tapax.scope("net"):
        x = tapax.sow(jnp.sin(x), "hidden")
        return tapax.sow(x * 2, "output")


def message(call):
    with pytest.raises((tapax.SiteError, TypeError)) as error:
        call()
    return str(error.value)


def test_an_unknown_site_is_named_with_its_neighbours():
    text = message(lambda: tapax.capture(net, values="net/hiden")(X))
    assert text == (
        "values='net/hiden' picks nothing: tracing the function reached no site with that name. "
        "The nearest names are 'net/hidden'."
    )
    assert "'net/hidden'" in message(lambda: tapax.capture(net, values="hidden")(X))
    assert "'net/hidden'" in message(lambda: tapax.capture(jax.jit(net), values=["**", "hiden"])(X))


def test_a_misspelt_glob_is_named_with_its_neighbours():
    text = message(lambda: tapax.capture(net, values="**/hiden")(X))
    begin = "values='**/hiden' picks nothing: tracing the function reached no site that it matches."
    assert text.startswith(begin)
    assert "'net/hidden'" in text


def test_program_without_sites():
    text = message(lambda: tapax.capture(jnp.sin, values="h")(X))
    assert text.endswith("The program has no sites: mark a value with tapax.sow(value, name).")
    with pytest.warns(UserWarning, match="The function has no sites, so nothing is captured"):
        assert tapax.capture(jnp.sin)(X)[1].values == {}
    with pytest.warns(UserWarning, match="The function has no sites"):
        assert len(tapax.sites(lambda x: 2 * x)(X)) == 0
    captured = tapax.capture(jax.jit(jnp.cos), grads=None)
    with pytest.warns(UserWarning, match="The function has no sites"):
        captured(X)
    captured(X)  # pytest turns warnings into errors: a second one would raise
    assert tapax.capture(jnp.sin, values=None, grads=None)(X)[1].values == {}


def test_call_that_was_not_made():
    assert "nearest names are 'net/hidden'" in message(
        lambda: tapax.capture(net, values="net/hidden@1")(X)
    )


def test_gradient_that_is_not_taken():
    line = inspect.getsourcelines(net)[1] + 2
    text = message(lambda: tapax.capture(net, grads="net/hidden")(X))
    assert f"{__file__}:{line}, which has no gradient: the program takes no gradient" in text


def test_gradient_that_does_not_reach():
    def loss(x):
        tapax.sow(jnp.sin(x), "dropped")
        return jnp.sum(tapax.sow(x, "used") ** 2)

    text = message(lambda: tapax.capture(jax.grad(loss), grads="dropped")(X))
    assert "no cotangent reached it" in text
    assert "does not use the value that tapax.sow returned" in text
    _, taps = tapax.capture(jax.grad(loss))(X)
    assert set(taps.grads) == {"used"}


def test_globs_of_gradients_may_find_none():
    _, taps = tapax.capture(net, grads="net/*")(X)
    assert taps.grads == {}


def test_steps_without_a_while_loop():
    line = inspect.getsourcelines(net)[1] + 2
    text = message(lambda: tapax.capture(net, values="net/hidden", steps=3)(X))
    assert text == (
        f"steps=3 does not apply to the site 'net/hidden', marked at {__file__}:{line}, which is "
        "in no loop: `steps` is the number of iterations of a while loop to keep. Leave `steps` "
        "out, or select only sites in a while loop."
    )
    scanned = lambda x: lax.scan(lambda c, _: (tapax.sow(c, "h"), None), x, None, length=3)[0]
    assert "is in the loops scan[3]" in message(lambda: tapax.capture(scanned, steps=3)(X))
    assert "no value is captured" in message(lambda: tapax.capture(jnp.sin, steps=3)(X))


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_steps_must_be_a_count(steps):
    assert "`steps` must be" in message(lambda: tapax.capture(net, steps=steps))


def test_step_without_a_loop():
    text = message(lambda: tapax.capture(net, values=tapax.at("net/hidden", step=1))(X))
    assert "is in no loop. Leave `step` out." in text


def test_step_out_of_range():
    scanned = lambda x: lax.scan(lambda c, _: (tapax.sow(c, "h"), None), x, None, length=3)[0]
    assert "its loop has 3 iterations" in message(
        lambda: tapax.capture(scanned, values=tapax.at("h", step=3))(X)
    )
    loop = lambda x: lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: tapax.sow(c + 1, "h"), x)
    for step in (slice(1, None), -1, slice(None, None, -1)):
        assert "must count from the start and have an end" in message(
            lambda step=step: tapax.capture(loop, values=tapax.at("h", step=step))(X)
        )


def test_function_compiled_ahead_of_time():
    lowered = jax.jit(net).lower(X)
    for done in (lowered, lowered.compile()):
        text = message(lambda done=done: tapax.capture(done))
        assert "already traced or compiled ahead of time: there is nothing left to trace" in text
        assert "jax.jit(tapax.capture(fn)).lower(...).compile()" in text
    assert "takes a function" in message(lambda: tapax.capture(3))
    assert "`sites` takes a function" in message(lambda: tapax.sites(None))


@pytest.mark.parametrize("selection", [3, 1.5, b"a", object()])
def test_only_selections_are_accepted(selection):
    text = message(lambda: tapax.capture(net, values=selection))
    assert text.startswith("`values` must be a selection of sites")


def test_empty_selections_pick_nothing():
    for nothing in (None, [], ()):
        _, taps = tapax.capture(net, values=nothing, grads=nothing)(X)
        assert taps.values == {}
    assert "is an empty string" in message(lambda: tapax.capture(net, grads=""))


def test_rules_take_strings():
    assert "`ops` takes one or more strings" in message(lambda: tapax.ops())
    assert "`named` takes one or more strings" in message(lambda: tapax.named(3))
    assert "a file and a line number" in message(lambda: tapax.lines("model.py"))
    assert "takes an integer or a slice" in message(lambda: tapax.at("h", step=1.5))
    assert "has no such operation" in message(
        lambda: tapax.capture(net, values=tapax.ops("sine"))(X)
    )


def test_errors_come_before_anything_runs():
    ran = []

    def fn(x):
        jax.debug.callback(lambda: ran.append(1))
        return tapax.sow(x, "h")

    for form in (fn, jax.jit(fn)):
        with pytest.raises(tapax.SiteError):
            tapax.capture(form, values="g")(X)
    jax.effects_barrier()
    assert ran == []


def test_site_error_is_a_value_error():
    assert issubclass(tapax.SiteError, ValueError)
