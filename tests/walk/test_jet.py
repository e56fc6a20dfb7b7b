"""Taylor mode, `jax.experimental.jet`: captures and edits of what it differentiates."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

import tapax

X = jnp.array([0.3, 0.5, 1.1])
SERIES = [jnp.array([1.0, 0.5, -1.0]), jnp.array([0.2, 0.0, 2.0]), jnp.array([0.0, 1.0, -0.5])]

EDITS = {
    "a factor": lambda h: 3 * h,
    "a power": lambda h: h**3 + h,
    "a mixture": lambda h: jnp.sin(h) * jnp.sum(h**2),
    "a constant": lambda h: jnp.ones_like(h),
}


def net(x, edit=None):
    h = jnp.tanh(2 * x)
    h = tapax.sow(h, "h") if edit is None else edit(h)
    return jnp.sum(jnp.sin(h) * x)


def derivatives(fn, x):
    """Return the first four derivatives along a curve."""
    out, terms = jet(fn, (x,), (SERIES,))
    return jnp.stack([out, *terms])


def nested_derivatives(fn, x):
    """Return the first four derivatives along the curve by nested forward derivatives."""
    powers = jnp.array([1.0, 2.0, 6.0])
    curve = lambda t: x + sum(s * t**i / p for i, (s, p) in enumerate(zip(SERIES, powers), 1))  # noqa: B905
    along = lambda t: fn(curve(t))
    found = [along]
    for _ in SERIES:
        found.append(jax.grad(found[-1]))
    return jnp.stack([f(0.0) for f in found])


def test_taylor_mode_is_captured():
    out, taps = tapax.capture(functools.partial(derivatives, net))(X)
    plain = derivatives(lambda x: net(x, lambda h: h), X)
    np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(taps.values["h"], jnp.tanh(2 * X), rtol=1e-6)
    np.testing.assert_allclose(
        out, nested_derivatives(lambda x: net(x, lambda h: h), X), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_taylor_mode_differentiates_edits(name, wrap):
    """The references share no code: JAX's Taylor mode and nested derivatives of the edited net."""
    edit = EDITS[name]
    edited = tapax.edit(wrap(functools.partial(derivatives, net)), values={"h": edit})
    by_hand = lambda x: net(x, edit)
    np.testing.assert_allclose(edited(X), derivatives(by_hand, X), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(edited(X), nested_derivatives(by_hand, X), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", EDITS)
def test_gradients_of_taylor_mode_differentiate_edits(name):
    edit = EDITS[name]
    loss = lambda fn: lambda x: jnp.sum(derivatives(fn, x) ** 2)
    want = jax.grad(loss(lambda x: net(x, edit)))(X)
    for take in (
        lambda: tapax.edit(jax.grad(loss(net)), values={"h": edit})(X),
        lambda: jax.grad(tapax.edit(loss(net), values={"h": edit}))(X),
    ):
        np.testing.assert_allclose(take(), want, rtol=1e-3, atol=1e-3 * jnp.abs(want).max())


def test_taylor_mode_of_a_gradient_differentiates_edits():
    score = lambda fn: lambda x: jnp.vdot(jax.grad(fn)(x), jnp.arange(1.0, 4.0))
    edits = {"h": EDITS["a power"]}
    got = tapax.edit(functools.partial(derivatives, score(net)), values=edits)(X)
    by_hand = lambda x: net(x, EDITS["a power"])
    np.testing.assert_allclose(got, derivatives(score(by_hand), X), rtol=1e-3, atol=1e-2)


def test_taylor_mode_of_an_edited_gradient():
    """The gradient of h is squared, in the program and by hand."""

    @jax.custom_vjp
    def squares(h):
        return h

    squares.defvjp(lambda h: (h, None), lambda _, ct: (ct**2,))
    score = lambda fn: lambda x: jnp.vdot(jax.grad(fn)(x), jnp.arange(1.0, 4.0))
    step = functools.partial(derivatives, score(net))
    got = tapax.edit(step, grads={"h": lambda g: g**2})(X)
    # Taylor mode knows no custom rules, so the reference nests forward derivatives.
    want = nested_derivatives(score(lambda x: net(x, squares)), X)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)


def test_modules_in_taylor_mode_are_captured_searched_and_mapped():
    """A network trained on its second derivative, as for a differential equation."""
    mlp = eqx.nn.MLP(1, "scalar", 4, 2, activation=jnp.tanh, key=jax.random.key(0))
    points = jnp.linspace(0.0, 1.0, 5)[:, None]

    def residual(mlp, x):
        _, (_, second) = jet(mlp, (x,), ((jnp.ones(1), jnp.zeros(1)),))
        return second**2

    loss = lambda mlp, points: jnp.mean(jax.vmap(residual, (None, 0))(mlp, points))
    step = eqx.filter_value_and_grad(loss)
    (value, grads), taps = tapax.capture(step)(mlp, points)
    plain_value, plain_grads = step(mlp, points)
    np.testing.assert_allclose(value, plain_value, rtol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        eqx.filter(grads, eqx.is_array),
        eqx.filter(plain_grads, eqx.is_array),
    )
    assert [*taps.values] == [*(f"MLP/layers/{i}" for i in range(3)), "MLP"]
    hidden = jax.vmap(mlp.layers[0])(points)
    np.testing.assert_allclose(taps.values["MLP/layers/0"], hidden, rtol=1e-6)
    bad = eqx.tree_at(lambda m: m.layers[1].bias, mlp, jnp.full(4, jnp.nan))
    assert "layers/1" in tapax.find_nonfinite(loss)(bad, points).path
