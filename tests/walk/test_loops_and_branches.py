"""Values inside scans, while loops and conditionals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tests.models.next_jax import next_flags
from tests.oracles.closeness import assert_close

X = jnp.array([1.0, 2.0])


def test_scan_stacks_values_in_the_order_of_its_inputs():
    def f(x, reverse):
        body = lambda c, t: (tapax.sow(c + t, "h"), None)
        return lax.scan(body, x, jnp.arange(1.0, 4.0), reverse=reverse)[0]

    _, taps = tapax.capture(lambda x: f(x, False))(X)
    assert_close(taps.values["h"], [X + 1, X + 3, X + 6])
    assert taps.sites["h"].loops == ("scan[3]",)
    _, taps = tapax.capture(lambda x: f(x, True))(X)
    assert_close(taps.values["h"], [X + 6, X + 5, X + 3])
    _, taps = tapax.capture(jax.grad(lambda x: jnp.sum(f(x, True) ** 2)))(X)
    assert_close(taps.grads["h"], [2 * (X + 6)] * 3)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_scan_of_the_next_jax_is_captured_and_edited(wrap):
    body = lambda c, t: (tapax.sow(jnp.sin(c) * t, "h"), c)
    fn = lambda x: lax.scan(body, x, jnp.arange(1.0, 4.0))
    h, every = np.asarray(X, np.float64), []
    for t in (1, 2, 3):
        h = np.sin(h) * t
        every.append(h)
    with next_flags():
        plain = wrap(fn)(X)
        out, taps = wrap(tapax.capture(fn))(X)
        loss = lambda x: jnp.sum(fn(x)[0])
        grads = wrap(tapax.grad(loss))(X)["h"]
        edited = wrap(tapax.edit(loss, values={tapax.at("h", step=2): 0.5}))(X)
        assert tapax.find_nonfinite(fn)(X) is None
    assert_close(out, plain)
    assert_close(taps.values["h"], np.stack(every))
    assert taps.sites["h"].loops == ("scan[3]",)
    assert_close(grads[2], np.ones(2))
    assert_close(grads[1], 3 * np.cos(every[1]))
    assert_close(edited, 1.0)


def test_scan_without_iterations_returns_empty_arrays():
    _, taps = tapax.capture(
        lambda x: lax.scan(lambda c, t: (tapax.sow(c + t, "h"), None), x, jnp.zeros((0,)))
    )(X)
    assert taps.values["h"].shape == (0, 2)


def test_associative_scan_keeps_every_call():
    _, taps = tapax.capture(lambda x: lax.associative_scan(lambda a, b: tapax.sow(a + b, "h"), x))(
        jnp.arange(8.0)
    )
    assert [taps.values[n].shape for n in taps.sites.names][:3] == [(4,), (2,), (1,)]
    assert_close(taps.values["h"], [1, 5, 9, 13])


def loop(n):
    body = lambda c: (c[0] + 1, tapax.sow(c[1] * 2, "h"))
    return lambda x: lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_while_loop_returns_the_last_value_and_the_count(n):
    out, taps = tapax.capture(loop(n))(X)
    assert_close(out, X * 2**n)
    assert_close(taps.values["h"], X * 2**n if n else 0 * X)
    assert taps.valid["h"].dtype == jnp.int32
    assert int(taps.valid["h"]) == n
    assert taps.sites["h"].loops == ("while",)


@pytest.mark.parametrize("n", [0, 2, 3, 5])
def test_while_loop_returns_the_first_steps(n):
    _, taps = tapax.capture(loop(n), steps=3)(X)
    ran = np.arange(3) < n
    assert_close(taps.valid["h"], ran)
    assert_close(taps.values["h"], np.where(ran[:, None], X * 2.0 ** np.arange(1, 4)[:, None], 0))


def test_while_in_scan_and_scan_in_while_are_captured():
    def f(x):
        outer = lambda c, n: (loop(n)(c), None)
        return lax.scan(outer, x, jnp.arange(3))[0]

    _, taps = tapax.capture(f)(X)
    assert_close(taps.valid["h"], [0, 1, 2])
    assert_close(taps.values["h"], [0 * X, 2 * X, 8 * X])

    def g(x):
        inner = lambda c: lax.scan(lambda c, t: (tapax.sow(c + t, "h"), None), c, jnp.ones(2))[0]
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, inner(c[1])), (0, x))[1]

    _, taps = tapax.capture(g)(X)
    assert_close(taps.values["h"], [X + 5, X + 6])
    assert int(taps.valid["h"]) == 3
    assert taps.sites["h"].loops == ("while", "scan[2]")


def test_while_loop_in_a_while_loop_counts_all_iterations():
    def f(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, loop(c[0])(c[1])), (0, x))

    _, taps = tapax.capture(f)(X)
    assert int(taps.valid["h"]) == 3  # 0 + 1 + 2 iterations
    assert_close(taps.values["h"], 8 * X)


def test_values_in_the_predicate_of_a_while_loop_are_captured():
    def f(x):
        return lax.while_loop(lambda c: tapax.sow(jnp.sum(c), "total") < 20, lambda c: 2 * c, x)

    out, taps = tapax.capture(f)(X)
    assert_close(out, 8 * X)
    assert_close(taps.values["total"], 24)
    assert int(taps.valid["total"]) == 4
    with pytest.raises(tapax.SiteError, match="in the predicate of a while loop"):
        tapax.capture(f, steps=3)(X)


def test_fori_loop_with_traced_bounds_is_a_while_loop():
    f = lambda n, x: lax.fori_loop(0, n, lambda i, c: tapax.sow(c + i, "h"), x)
    _, taps = tapax.capture(jax.jit(f))(4, X)
    assert_close(taps.values["h"], X + 6)
    assert int(taps.valid["h"]) == 4


def pick(i, x):
    return lax.switch(
        i, [lambda x: tapax.sow(2 * x, "a"), lambda x: x, lambda x: tapax.sow(3 * x, "b")], x
    )


@pytest.mark.parametrize("i", [0, 1, 2])
def test_branches_have_a_mask(i):
    _, taps = tapax.capture(jax.jit(pick))(i, X)
    assert_close(taps.values["a"], 2 * X * (i == 0))
    assert_close(taps.values["b"], 3 * X * (i == 2))
    assert bool(taps.valid["a"]) == (i == 0)
    assert bool(taps.valid["b"]) == (i == 2)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_gradients_of_branches_have_a_mask(i):
    step = jax.jit(jax.grad(lambda i, x: jnp.sum(pick(i, x) ** 2), argnums=1))
    _, taps = tapax.capture(step)(i, X)
    assert_close(taps.grads["a"], 4 * X * (i == 0))
    assert_close(taps.grads["b"], 6 * X * (i == 2))


def test_one_name_in_two_branches_is_two_sites():
    f = lambda p, x: lax.cond(p, lambda x: tapax.sow(x, "h"), lambda x: tapax.sow(-x, "h"), x)
    step = jax.jit(jax.grad(lambda p, x: jnp.sum(f(p, x) ** 2), argnums=1))
    for p in (True, False):
        _, taps = tapax.capture(step)(p, X)
        # Calls are numbered as written: the branch for true comes first.
        assert_close(taps.valid["h"], p)
        assert_close(taps.valid["h@1"], not p)
        assert_close(taps.grads["h"], 2 * X if p else 0 * X)
        assert_close(taps.grads["h@1"], 0 * X if p else -2 * X)


def test_one_function_in_two_branches_keeps_its_gradients_apart():
    scale = jax.jit(lambda x, c: tapax.sow(x * c, "h"))
    f = lambda p, x: lax.cond(p, lambda x: scale(x, 2.0), lambda x: scale(x, 3.0) ** 2, x)
    step = jax.jit(jax.grad(lambda p, x: jnp.sum(f(p, x)), argnums=1))
    _, taps = tapax.capture(step)(True, X)
    assert_close(taps.values["h"], 2 * X)
    assert_close(taps.grads["h"], jnp.ones(2))
    _, taps = tapax.capture(step)(False, X)
    assert_close(taps.values["h@1"], 3 * X)
    assert_close(taps.grads["h@1"], 6 * X)


def test_branches_in_a_scan_have_stacked_masks():
    def f(x):
        body = lambda c, i: (
            lax.cond(i % 2 == 0, lambda c: tapax.sow(2 * c, "e"), lambda c: c, c),
            0,
        )
        return jnp.sum(lax.scan(body, x, jnp.arange(4))[0])

    _, taps = tapax.capture(jax.grad(f))(X)
    assert_close(taps.valid["e"], [True, False, True, False])
    assert_close(taps.values["e"], [2 * X, 0 * X, 4 * X, 0 * X])
    assert_close(taps.grads["e"], [2 + 0 * X, 0 * X, 1 + 0 * X, 0 * X])


def test_branches_in_a_while_loop_have_counts():
    def f(x):
        grow = lambda c: lax.cond(c[0] % 2 == 0, lambda y: tapax.sow(2 * y, "e"), lambda y: y, c[1])
        return lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, grow(c)), (0, x))[1]

    _, taps = tapax.capture(f)(X)
    assert_close(taps.values["e"], 4 * X)
    assert int(taps.valid["e"]) == 2
    _, taps = tapax.capture(f, steps=5)(X)
    assert_close(taps.valid["e"], [True, False, True, False, False])
    assert_close(taps.values["e"], [2 * X, 0 * X, 4 * X, 0 * X, 0 * X])


def test_at_selects_iterations_of_a_scan():
    f = lambda x: lax.scan(lambda c, t: (tapax.sow(c + t, "h"), None), x, jnp.arange(6.0))[0]
    whole = tapax.capture(f)(X)[1].values["h"]
    for step in (slice(1, 3), slice(None, None, 2), slice(-2, None), 4, -1):
        _, taps = tapax.capture(f, values=tapax.at("h", step=step))(X)
        assert_close(taps.values["h"], whole[step])
    _, taps = tapax.capture(jax.grad(lambda x: jnp.sum(f(x) ** 2)), grads=tapax.at("h", step=2))(X)
    assert_close(taps.grads["h"], 2 * (X + 15))


def test_at_selects_iterations_of_a_while_loop():
    _, taps = tapax.capture(loop(4), values=tapax.at("h", step=slice(1, 6, 2)))(X)
    assert_close(taps.valid["h"], [True, True, False])
    assert_close(taps.values["h"], [4 * X, 16 * X, 0 * X])
    _, taps = tapax.capture(loop(4), values=tapax.at("h", step=2))(X)
    assert_close(taps.values["h"], 8 * X)
    assert bool(taps.valid["h"])


def test_at_counts_iterations_of_the_innermost_loop():
    def f(x):
        inner = lambda c: lax.scan(lambda c, t: (tapax.sow(c + t, "h"), None), c, jnp.ones(3))[0]
        return lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]

    _, taps = tapax.capture(f, values=tapax.at("h", step=1))(X)
    assert_close(taps.values["h"], [X + 2, X + 5])


ANGLES = jnp.array([0.3, -0.7, 1.2])


def test_invariant_values_are_stacked_for_every_iteration():
    w = jnp.array([2.0, 3.0, 4.0])

    def loss(w, x):
        def body(c, _):
            a = tapax.sow(c * 2, "h")
            return a * tapax.sow(jnp.sin(w), "h"), None

        return jnp.sum(lax.scan(body, x, None, length=2)[0])

    for step in (loss, jax.grad(loss), jax.jit(jax.grad(loss, argnums=1))):
        _, taps = tapax.capture(step)(w, ANGLES)
        s = jnp.sin(w)
        assert_close(taps.values["h"], [2 * ANGLES, 4 * ANGLES * s])
        assert_close(taps.values["h@1"], [s, s])
    _, taps = tapax.capture(jax.grad(loss))(w, ANGLES)
    assert_close(taps.grads["h@1"], [4 * ANGLES * s, 4 * ANGLES * s])


def test_loops_that_run_eagerly_have_one_body():
    f = lambda x: jnp.sum(
        lax.scan(lambda c, _: (tapax.sow(2 * c, "h"), None), x, None, length=3)[0]
    )
    step = jax.grad(f)
    with jax.disable_jit():
        _, eager = tapax.capture(step, values="h@0")(ANGLES)
    _, traced = tapax.capture(step)(ANGLES)
    assert set(eager.values) == set(eager.grads) == {"h"}
    assert_close(eager.values["h"], traced.values["h"])
    assert_close(eager.grads["h"], traced.grads["h"])


def test_a_gradient_that_was_not_computed_leaves_its_value_valid():
    def loss(p, x):
        h = tapax.sow(2 * x, "h")
        return lax.cond(p, lambda h: jnp.sum(h), lambda h: 0.0, h)

    _, taps = tapax.capture(jax.grad(loss, argnums=1))(False, ANGLES)
    assert_close(taps.values["h"], 2 * ANGLES)
    assert taps.valid == {}


def test_a_while_loop_in_remat_keeps_no_residuals():
    def loop(x):
        body = lambda c: (c[0] + 1, tapax.sow(jnp.sin(c[1]), "w"))
        return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

    step = jax.grad(jax.checkpoint(lambda x: jnp.sum(x * lax.stop_gradient(loop(x)))))
    out, taps = tapax.capture(step)(ANGLES)
    expected = jnp.sin(jnp.sin(jnp.sin(ANGLES)))
    assert_close(out, expected)
    assert_close(taps.values["w"], expected)
    assert set(taps.values) == {"w"}
    assert int(taps.valid["w"]) == 3


def test_a_linearized_while_loop_is_captured_once():
    def loop(x):
        body = lambda c: (c[0] + 1, tapax.sow(jnp.sin(c[1]), "w"))
        return lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]

    step = lambda x: jax.linearize(loop, x)[1](jnp.ones(3))
    out, taps = tapax.capture(step)(ANGLES)
    assert_close(out, jnp.cos(ANGLES) * jnp.cos(jnp.sin(ANGLES)))
    assert set(taps.values) == {"w"}
    assert_close(taps.values["w"], jnp.sin(jnp.sin(ANGLES)))


def test_a_linearized_while_loop_in_a_map_is_captured():
    def loop(x):
        body = lambda c: (c[0] + 1, tapax.sow(jnp.sin(c[1]), "w"))
        return lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]

    step = lambda x: jax.linearize(lambda x: lax.map(loop, x), x)[1](jnp.ones(3))
    _, taps = tapax.capture(step)(ANGLES)
    assert set(taps.values) == {"w"}
    assert_close(taps.values["w"], jnp.sin(jnp.sin(ANGLES)))
