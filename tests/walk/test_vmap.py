"""Batch axes lead, outermost first; a value lacks the axes on which it does not depend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tests.oracles.closeness import assert_close


def test_any_in_axes_are_moved_to_the_front():
    m = jnp.arange(15.0).reshape(3, 5)
    _, taps = tapax.capture(jax.vmap(lambda c: tapax.sow(2 * c, "h"), in_axes=1, out_axes=1))(m)
    assert_close(taps.values["h"], 2 * m.T)


def test_nested_vmaps_put_outer_axes_first():
    m = jnp.arange(105.0).reshape(3, 5, 7)
    inner = jax.vmap(lambda c: tapax.sow(2 * c, "h"), in_axes=1)
    _, taps = tapax.capture(jax.vmap(inner, in_axes=2))(m)
    assert_close(taps.values["h"], 2 * jnp.transpose(m, (2, 1, 0)))


def test_a_value_that_does_not_depend_on_the_axis_has_none():
    def f(x, y):
        return tapax.sow(jnp.sin(y), "free") + tapax.sow(x, "mapped")

    _, taps = tapax.capture(jax.vmap(f, in_axes=(0, None)))(jnp.ones(4), jnp.ones(2))
    assert taps.values["free"].shape == (2,)
    assert taps.values["mapped"].shape == (4,)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_per_example_gradients_are_captured(wrap):
    def loss(x):
        return jnp.sum(wrap(lambda x: tapax.sow(jnp.sin(x), "h"))(x) ** 2)

    m = jnp.arange(12.0).reshape(4, 3)
    _, taps = tapax.capture(jax.vmap(jax.grad(loss)))(m)
    assert_close(taps.grads["h"], 2 * jnp.sin(m))
    _, taps = tapax.capture(jax.grad(lambda m: jnp.sum(jax.vmap(loss)(m))))(m)
    assert_close(taps.grads["h"], 2 * jnp.sin(m))


def test_loops_come_before_mapped_axes():
    def f(x):
        return lax.scan(lambda c, t: (tapax.sow(c * t, "h"), None), x, jnp.array([2.0, 3.0]))[0]

    m = jnp.arange(4.0)
    _, taps = tapax.capture(jax.vmap(f))(m)
    assert_close(taps.values["h"], jnp.stack([2 * m, 6 * m]))


def branch(i, x):
    double, triple = lambda x: tapax.sow(2 * x, "a"), lambda x: tapax.sow(3 * x, "b")
    return lax.switch(i, [double, lambda x: x, triple], x)


I = jnp.array([0, 2, 1, 2])
M = jnp.arange(1.0, 9.0).reshape(4, 2)


def masked(x, mask):
    return np.where(np.asarray(mask)[:, None], x, 0)


def test_mapped_predicate_masks_the_examples_of_the_branch():
    _, taps = tapax.capture(jax.vmap(branch))(I, M)
    for name, number, factor in (("a", 0, 2), ("b", 2, 3)):
        assert_close(taps.valid[name], number == I)
        assert_close(taps.values[name], masked(factor * M, number == I))


@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
def test_gradients_under_a_mapped_predicate_are_masked(order):
    one = lambda i, x: jnp.sum(branch(i, x) ** 2)
    step = {
        "vmap of grad": jax.vmap(jax.grad(one, argnums=1)),
        "grad of vmap": jax.grad(lambda i, m: jnp.sum(jax.vmap(one)(i, m)), argnums=1),
    }[order]
    out, taps = tapax.capture(step)(I, M)
    assert_close(out, step(I, M))
    for name, number, factor in (("a", 0, 2), ("b", 2, 3)):
        assert_close(taps.grads[name], masked(2 * factor * M, number == I))
        assert_close(taps.valid[name], number == I)


def test_nested_mapped_predicates_combine_their_masks():
    def f(p, q, x):
        inner = lambda x: lax.cond(q, lambda x: tapax.sow(x, "h"), lambda x: x, x)
        return lax.cond(p, jax.jit(inner), lambda x: x, x)

    p, q = jnp.array([True, True, False, False]), jnp.array([True, False, True, False])
    _, taps = tapax.capture(jax.vmap(f))(p, q, M)
    assert_close(taps.valid["h"], p & q)
    assert_close(taps.values["h"], masked(M, p & q))


def test_mapped_predicate_around_a_scan_masks_examples():
    def f(p, x):
        run = lambda x: lax.scan(
            lambda c, t: (tapax.sow(c * t, "h"), None), x, jnp.arange(1.0, 4.0)
        )
        return lax.cond(p, lambda x: run(x)[0], lambda x: x, x)

    p = jnp.array([True, False, True, False])
    _, taps = tapax.capture(jax.vmap(f))(p, M)
    assert_close(taps.valid["h"], np.broadcast_to(p, (3, 4)))
    assert_close(taps.values["h"], np.stack([masked(c * M, p) for c in (1, 2, 6)]))


def count_up(n, x):
    body = lambda c: (c[0] + 1, tapax.sow(c[1] + 1, "h"))
    return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]


N = jnp.array([0, 1, 3, 2])


def test_while_with_a_mapped_predicate_stops_with_each_example():
    out, taps = tapax.capture(jax.vmap(count_up))(N, M)
    assert_close(out, M + N[:, None])
    assert_close(taps.valid["h"], N)
    assert_close(taps.values["h"], masked(M + N[:, None], N > 0))


def test_first_steps_of_a_while_loop_with_a_mapped_predicate():
    _, taps = tapax.capture(jax.vmap(count_up), steps=2)(N, M)
    mask = jnp.arange(2)[:, None] < N
    assert_close(taps.valid["h"], mask)
    expected = M + jnp.arange(1.0, 3.0)[:, None, None]
    assert_close(taps.values["h"], np.where(mask[..., None], expected, 0))


def test_scan_in_a_while_loop_with_a_mapped_predicate():
    def f(n, x):
        inner = lambda x: lax.scan(lambda c, t: (tapax.sow(c + t, "h"), None), x, jnp.ones(2))[0]
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, inner(c[1])), (0, x))[1]

    _, taps = tapax.capture(jax.vmap(f))(N, M)
    last = M + 2 * N[:, None]
    expected = np.stack([masked(last - 1, N > 0), masked(last, N > 0)])
    assert_close(taps.values["h"], expected)
    assert_close(taps.valid["h"], np.broadcast_to(N, (2, 4)))


def test_capture_itself_can_be_mapped():
    out, taps = jax.vmap(tapax.capture(lambda x: tapax.sow(jnp.sin(x), "h") * 2))(M)
    assert_close(taps.values["h"], jnp.sin(M))
    assert_close(out, 2 * jnp.sin(M))


def test_a_vmap_inside_a_mapped_while_loop_is_told_from_the_outer_vmap():
    # There are as many inner examples as outer ones, so sizes cannot distinguish them.
    def f(n, x):
        def body(c):
            jax.vmap(lambda v: tapax.sow(v * 10, "h"))(jnp.arange(1.0, 4.0))
            return c[0] + 1, c[1] + 1

        return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]

    n = jnp.array([0, 1, 2])
    _, taps = tapax.capture(jax.vmap(f))(n, jnp.zeros(3))
    assert_close(taps.values["h"], [[0, 0, 0], [10, 20, 30], [10, 20, 30]])
    assert_close(taps.valid["h"], n)


def test_predicate_mapped_by_the_inner_vmap_value_by_the_outer():
    def f(n, x):
        body = lambda c: (c[0] + 1, tapax.sow(c[1] + x, "h"))
        return lax.while_loop(lambda c: c[0] < n, body, (0, 0.0))[1]

    n, x = jnp.array([0, 2]), jnp.array([10.0, 20.0])
    inner = jax.vmap(f, in_axes=(0, None))
    _, taps = tapax.capture(jax.vmap(inner, in_axes=(None, 0)))(n, x)
    assert_close(taps.values["h"], [[0, 20], [0, 40]])
    assert_close(taps.valid["h"], [[0, 2], [0, 2]])


def test_gradients_in_mapped_branches_that_share_a_function():
    shared = jax.jit(lambda x, c: tapax.sow(jnp.sin(c * x), "h"))
    f = lambda p, x: lax.cond(p, lambda x: shared(x, 2.0), lambda x: shared(x, 3.0) ** 2, x)
    p, x = jnp.array([True, False]), jnp.array([0.2, 0.4])
    _, taps = tapax.capture(jax.vmap(jax.grad(f, argnums=1)))(p, x)
    # Both branches share one trace, which shows which branch ran but not which comes first.
    yes, no = sorted(taps.values, key=lambda name: not bool(taps.valid[name][0]))
    assert_close(taps.valid[yes], p)
    assert_close(taps.grads[yes], [1, 0])
    assert_close(taps.grads[no], [0, 2 * jnp.sin(1.2)])


def test_calls_in_mapped_branches_are_numbered_as_written():
    f = lambda p, x: lax.cond(
        p, lambda x: tapax.sow(tapax.sow(2 * x, "h") + 1, "h"), lambda x: tapax.sow(3 * x, "h"), x
    )
    p, x = jnp.array([True, False]), jnp.array([1.0, 2.0])
    _, taps = tapax.capture(jax.vmap(f))(p, x)
    assert_close(taps.values["h"], [2, 0])
    assert_close(taps.values["h@1"], [3, 0])
    assert_close(taps.values["h@2"], [0, 6])


@jax.jit
def jitted_branch(x):
    return tapax.sow(jnp.cos(x), "b")


def plain_branch(x):
    return tapax.sow(jnp.cos(x), "b")


@pytest.mark.parametrize("other", [jitted_branch, plain_branch], ids=["jitted", "cached"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_branches_keep_their_numbers_when_one_of_them_was_traced_before(other, wrap):
    def loss(p, x):
        def one(p, x):
            return lax.cond(p, lambda x: tapax.sow(jnp.sin(x), "b"), other, x)

        return wrap(jnp.sin)(jax.vmap(one)(p, x)).sum()

    p, x = jnp.array([True, False]), jnp.array([0.5, 0.5])
    tapax.capture(other)(x[0])  # JAX keeps the trace of the other branch
    for _ in range(2):
        _, taps = tapax.capture(jax.grad(loss, 1))(p, x)
        grads = tapax.grad(loss)(p, x)
        for name, row, value in (("b", 0, np.sin(0.5)), ("b@1", 1, np.cos(0.5))):
            assert_close(taps.values[name][row], np.float32(value), 1e-6)
            for found in (taps.grads, grads):
                assert_close(found[name][row], np.float32(np.cos(value)), 1e-6)
                assert found[name][1 - row] == 0


def test_branches_of_a_switch_keep_their_numbers():
    def fn(i, x):
        branches = [lambda x: tapax.sow(jnp.sin(x), "b"), jitted_branch]
        return jax.vmap(lambda i, x: lax.switch(i, branches, x))(i, x)

    i, x = jnp.array([1, 0]), jnp.array([0.5, 0.5])
    for _ in range(2):
        _, taps = tapax.capture(fn)(i, x)
        assert_close(taps.values["b"][1], np.float32(np.sin(0.5)), 1e-6)
        assert_close(taps.values["b@1"][0], np.float32(np.cos(0.5)), 1e-6)
