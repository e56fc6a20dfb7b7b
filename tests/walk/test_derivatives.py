"""Every JAX way to take a gradient is captured, under the name of the right call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7, 1.2])


def loss(x):
    return jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2)


def test_program_that_takes_no_gradient_returns_none():
    _, taps = tapax.capture(loss)(X)
    assert taps.grads == {}
    assert_close(taps.values["h"], jnp.sin(X))


@pytest.mark.parametrize(
    "step",
    [
        jax.grad(loss),
        lambda x: jax.value_and_grad(loss)(x),
        lambda x: jax.vjp(loss, x)[1](1.0),
        lambda x: jax.grad(lambda x: (loss(x), x), has_aux=True)(x),
        lambda x: jax.grad(jax.jit(loss))(x),
        lambda x: jax.linear_transpose(jax.linearize(loss, x)[1], x)(1.0),
    ],
)
def test_every_reverse_mode_yields_gradients(step):
    _, taps = tapax.capture(step)(X)
    assert set(taps.values) == set(taps.grads) == {"h"}
    assert_close(taps.grads["h"], 2 * jnp.sin(X))


@pytest.mark.parametrize(
    "step",
    [lambda x: jax.jvp(loss, (x,), (x,)), lambda x: jax.linearize(loss, x)[1](x), jax.jacfwd(loss)],
)
def test_forward_mode_has_values_and_no_gradients(step):
    _, taps = tapax.capture(step)(X)
    assert taps.grads == {}
    assert_close(taps.values["h"], jnp.sin(X))


def test_values_and_gradients_under_hessian():
    out, taps = tapax.capture(jax.hessian(loss))(X)
    assert_close(out, jax.hessian(loss)(X))
    assert_close(taps.values["h"], jnp.sin(X))
    # jacrev maps over the single output of the loss, which adds an axis of length one.
    assert_close(taps.grads["h"], 2 * jnp.sin(X)[None])


def test_jacrev_maps_over_the_outputs():
    _, taps = tapax.capture(jax.jacrev(lambda x: 3 * tapax.sow(jnp.sin(x), "h")))(X)
    assert_close(taps.grads["h"], 3 * jnp.eye(3))


def test_reverse_over_reverse_gives_both_gradients():
    # L = sum(h^2), h = sin x: dL/dx = 2 sin x cos x. M = sum(dL/dx). M depends on h through h^2
    # alone, because cos x is not computed from h: dM/dh = 2 cos x.
    _, taps = tapax.capture(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))))(X)
    assert_close(taps.grads["h"], 2 * jnp.sin(X))
    assert_close(taps.grads["h~1"], 2 * jnp.cos(X))


def test_two_pullbacks_of_one_call_are_numbered():
    def step(x):
        _, pull = jax.vjp(loss, x)
        return pull(1.0), pull(5.0)

    _, taps = tapax.capture(step)(X)
    assert_close(taps.grads["h"], 2 * jnp.sin(X))
    assert_close(taps.grads["h~1"], 10 * jnp.sin(X))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (2, 1), (0, 1, 2)])
def test_a_gradient_belongs_to_its_call(wrap, used):
    # One traced body is called three times, and the loss does not depend on some of the calls.
    scale = wrap(lambda x, c: tapax.sow(x * c, "h"))

    def total(x):
        parts = [scale(x, c) for c in (2.0, 3.0, 5.0)]
        return sum(jnp.sum(parts[i] ** (i + 1)) for i in used)

    _, taps = tapax.capture(jax.grad(total))(X)
    names = ["h", "h@1", "h@2"]
    assert set(taps.values) == set(names)
    for i, (name, c) in enumerate(zip(names, (2.0, 3.0, 5.0), strict=True)):
        assert_close(taps.values[name], c * X)
        if i in used:
            assert_close(taps.grads[name], (i + 1) * (c * X) ** i)
        else:
            assert name not in taps.grads


def test_a_gradient_belongs_to_its_call_in_scans_that_share_a_body():
    def body(c, t):
        return tapax.sow(c * t, "h"), None

    ts = jnp.array([2.0, 3.0])

    def total(x):
        unused, _ = jax.lax.scan(body, x, ts)
        del unused
        y, _ = jax.lax.scan(body, x, 10 * ts)
        return jnp.sum(y)

    _, taps = tapax.capture(jax.grad(total))(X)
    assert_close(taps.values["h@1"], jnp.stack([20 * X, 600 * X]))
    assert set(taps.grads) == {"h@1"}
    assert_close(taps.grads["h@1"], jnp.stack([jnp.full(3, 30.0), jnp.ones(3)]))


def test_gradients_in_a_scan_of_train_steps_are_stacked():
    def step(w, x):
        g = jax.grad(lambda w: jnp.sum(tapax.sow(w * x, "h") ** 2))(w)
        return w - 0.1 * g, None

    xs = jnp.array([1.0, 2.0, 3.0])
    (w, _), taps = tapax.capture(lambda w: jax.lax.scan(step, w, xs))(0.5)
    expected_w, h = 0.5, []
    for x in (1.0, 2.0, 3.0):
        h.append(expected_w * x)
        expected_w -= 0.1 * 2 * expected_w * x * x
    assert_close(w, expected_w)
    assert_close(taps.values["h"], h)
    assert_close(taps.grads["h"], [2 * v for v in h])


def test_inner_step_and_outer_gradient_are_told_apart():
    # One step of MAML: the mark is called twice, and its first call has two gradients.
    def inner(w):
        return jnp.sum(tapax.sow(w * X, "h") ** 2)

    def outer(w):
        return inner(w - 0.1 * jax.grad(inner)(w))

    value, taps = tapax.capture(jax.value_and_grad(outer))(0.5)
    s = float(jnp.sum(X**2))
    w1 = 0.5 - 0.1 * 2 * 0.5 * s
    assert_close(value[1], 2 * w1 * s * (1 - 0.2 * s))
    assert_close(taps.grads["h"], 2 * 0.5 * X)
    assert_close(taps.grads["h@1"], 2 * w1 * X)
    # M = L(w1), w1 = w - 0.1 sum(2 h x): dM/dh = L'(w1) * (-0.2 x).
    assert_close(taps.grads["h~1"], 2 * w1 * s * (-0.2 * X))


def test_low_precision_values_keep_their_dtype():
    def step(x):
        return jax.grad(lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h")).astype(jnp.float32))(x)

    out, taps = tapax.capture(step)(X.astype(jnp.bfloat16))
    assert out.dtype == taps.values["h"].dtype == taps.grads["h"].dtype == jnp.bfloat16


def test_stop_gradient_leaves_no_gradient():
    def step(x):
        return jax.grad(lambda x: jnp.sum(x * jax.lax.stop_gradient(tapax.sow(jnp.sin(x), "h"))))(x)

    _, taps = tapax.capture(step)(X)
    assert taps.grads == {}
    with pytest.raises(tapax.SiteError, match="takes no gradient, or its gradients reach"):
        tapax.capture(step, grads="h")(X)


def second_derivative(block):
    """Compute d/dh of sum((dL/dx)^2), L = sum(block(x)^2), where `block` marks h."""

    def loss(x):
        return jnp.sum(block(x) ** 2)

    return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))


def test_second_derivatives_through_remat_add_the_part_of_the_recomputed_value():
    marked = lambda x: jnp.sin(tapax.sow(jnp.sin(x), "h"))
    _, plain = tapax.capture(second_derivative(marked))(X)
    _, remat = tapax.capture(second_derivative(jax.checkpoint(marked)))(X)
    # The oracle adds a perturbation that both derivatives see.
    perturbed = lambda e: lambda x: jnp.sin(jnp.sin(x) + e)
    total = lambda e: jnp.sum(jax.grad(lambda x: jnp.sum(perturbed(e)(x) ** 2))(X) ** 2)
    expected = jax.grad(total)(jnp.zeros(3))
    assert_close(plain.grads["h~1"], expected)
    assert_close(remat.grads["h~1"], expected)
    assert_close(remat.grads["h"], plain.grads["h"])


def test_second_derivatives_through_remat_can_be_read_in_several_ways():
    block = jax.checkpoint(lambda x: jnp.sin(tapax.sow(jnp.sin(x), "h")))
    inner = jax.grad(lambda x: jnp.sum(block(x)))
    step = jax.grad(lambda x: jnp.sum(inner(x) ** 2))
    _, whole = tapax.capture(step, values=None)(X)
    assert not np.allclose(whole.grads["h~1"], 0)
    asked = ["h", {"h": [tapax.reduce.rms, jnp.square]}]
    _, taps = tapax.capture(step, values=None, grads=asked)(X)
    for name in ("h", "h~1"):
        gradient = np.asarray(whole.grads[name])
        label, _, number = name.partition("~")
        number = f"~{number}" if number else ""
        assert_close(taps.grads[name], gradient)
        assert_close(taps.grads[f"{label}:square{number}"], gradient**2)
        assert_close(taps.grads[f"{label}:rms{number}"], np.sqrt(np.mean(gradient**2)))


@pytest.mark.parametrize("way", [tapax.reduce.rms, jnp.square])
def test_sums_of_second_gradients_are_neither_reduced_nor_passed_to_functions(way):
    block = jax.checkpoint(lambda x: jnp.sin(tapax.sow(jnp.sin(x), "h")))

    def outer(x):
        value, gradient = jax.value_and_grad(lambda x: jnp.sum(block(x) ** 2))(x)
        return value**2 + jnp.sum(gradient**2)

    with pytest.raises(tapax.SiteError, match=r"is the sum of several parts, so .* Capture it"):
        tapax.capture(jax.grad(outer), values=None, grads={"h": way})(X)
    perturbed = lambda e: lambda x: jnp.sum(jnp.sin(jnp.sin(x) + e) ** 2)
    total = lambda e: perturbed(e)(X) ** 2 + jnp.sum(jax.grad(perturbed(e))(X) ** 2)
    _, taps = tapax.capture(jax.grad(outer), values=None)(X)
    assert_close(taps.grads["h~1"], jax.grad(total)(jnp.zeros(3)))


def test_exactly_named_gradients_of_calls_are_returned():
    f = lambda x: jnp.sum(tapax.sow(x, "h")) * 0 + jnp.sum(tapax.sow(tapax.sow(x, "k"), "k") ** 2)
    dropped = lambda x: (tapax.sow(x, "h"), jnp.sum(tapax.sow(x, "h") ** 2))[1]
    with pytest.raises(tapax.SiteError, match=r"'h', marked at .* has no gradient: no cotangent"):
        tapax.capture(jax.grad(dropped), grads="h@0")(X)
    assert set(tapax.capture(jax.grad(dropped), grads="h")(X)[1].grads) == {"h@1"}

    def twice(x):
        _, pull = jax.vjp(f, x)
        return pull(1.0), pull(2.0)

    assert set(tapax.capture(twice, grads="k@0~1")(X)[1].grads) == {"k~1"}
    assert set(tapax.capture(twice, grads="k~1")(X)[1].grads) == {"k~1", "k@1~1"}


def test_residuals_may_be_put_on_a_device_together():
    def f(x):
        loss = lambda x: jnp.sum(tapax.sow(jnp.sin(tapax.sow(2 * x, "a")), "b") ** 2)
        out, back = jax.vjp(loss, x)
        return jax.device_put(back)(out)

    x = jnp.array([0.5, -1.0, 2.0])
    out, taps = tapax.capture(f)(x)
    assert_close(out, f(x))
    total = jnp.sum(jnp.sin(2 * x) ** 2)
    assert_close(taps.grads["b"], 2 * jnp.sin(2 * x) * total)
    assert_close(taps.grads["a"], 2 * jnp.sin(2 * x) * jnp.cos(2 * x) * total)


def test_calls_in_branches_are_numbered_alike_in_every_capture():
    """A jitted function that JAX traced earlier has older marks than the others."""
    layer = jax.jit(lambda x: tapax.sow(jnp.cos(x), "a"))

    def loss(x, flag):
        yes = lambda x: tapax.sow(jnp.sin(x), "b")
        no = lambda x: jax.lax.stop_gradient(tapax.sow(3 * layer(x), "b")) + x
        return jnp.sum(jax.lax.map(lambda row: jax.lax.cond(flag, yes, no, row), x[None]))

    for _ in range(2):
        for flag in (True, False):
            _, taps = tapax.capture(jax.grad(loss))(X, flag)
            assert_close(taps.values["b"], jnp.where(flag, jnp.sin(X), 0)[None])
            assert_close(taps.values["b@1"], jnp.where(flag, 0, 3 * jnp.cos(X))[None])
            assert_close(taps.grads["b"], jnp.full((1, 3), float(flag)))


@pytest.mark.parametrize("two", [jax.lax.switch, jax.lax.cond])
def test_calls_in_branches_are_numbered_as_written_if_jax_moves_the_index_out_of_the_loop(two):
    """The body of the loop then does not show whether the index was a boolean."""
    jitted = jax.jit(lambda x: tapax.sow(3 * jnp.sin(x), "a"))  # traced once

    def loss(x, index):
        new = lambda x: tapax.sow(jnp.cos(x), "a")  # traced in every capture
        if two is jax.lax.cond:
            body = lambda row: jax.lax.cond(index == 0, new, jitted, row)
        else:
            body = lambda row: jax.lax.switch(index, [new, jitted], row)
        return jnp.sum(jax.lax.map(body, x[None]))

    mapped = lambda x, index: jax.vmap(loss, in_axes=(0, None))(x[None], index)[0]
    for _ in range(2):
        for index in (0, 1):
            for fn in (loss, mapped):
                _, taps = tapax.capture(jax.grad(fn))(X, index)
                assert list(taps.values) == ["a", "a@1"]
                expected = [jnp.cos(X) * (index == 0), 3 * jnp.sin(X) * (index == 1)]
                for i, name in enumerate(["a", "a@1"]):
                    assert_close(taps.values[name].reshape(3), expected[i])
                    assert_close(taps.grads[name].reshape(3), jnp.full(3, float(index == i)))
