"""Functions that store jaxprs of their own, as some libraries do, in captures of other kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import tapax

X = jnp.array([0.3, 0.5, 1.1])


def net(x):
    return jnp.sum(jnp.tanh(tapax.sow(jnp.sin(x), "h")))


def keeping_by_jaxpr(fn):
    """Trace `fn` at the first call alone."""
    kept = []

    def call(x):
        if not kept:
            kept.append(jaxpr_as_fun(jax.make_jaxpr(fn)(x)))
        return kept[0](x)[0]

    return call


def keeping_by_closure(fn):
    kept = []

    def call(x):
        if not kept:
            kept.append(jax.closure_convert(fn, x))
        convert, consts = kept[0]
        return convert(x, *consts)

    return call


def scaled(factor):
    """Return the gradient of the net if `h` is scaled, and that of its loss by `h`."""
    h = factor * jnp.sin(X)
    return (1 - jnp.tanh(h) ** 2) * factor * jnp.cos(X), 1 - jnp.tanh(h) ** 2


EARLIER = {
    "capture": tapax.capture,
    "sites": tapax.sites,
    "values": lambda step: tapax.capture(step, grads=None),
}


@pytest.mark.parametrize("keeping", [keeping_by_jaxpr, keeping_by_closure])
@pytest.mark.parametrize("earlier", EARLIER)
def test_a_kept_program_is_edited_and_differentiated(earlier, keeping):
    step = jax.grad(keeping(net))
    EARLIER[earlier](step)(X)
    for factor in (0.0, 2.0):
        got = tapax.edit(step, values={"h": lambda h, factor=factor: factor * h})(X)
        np.testing.assert_allclose(got, scaled(factor)[0], atol=1e-6)
    tripled = tapax.edit(step, grads={"h": lambda g: 3 * g})(X)
    np.testing.assert_allclose(tripled, 3 * scaled(1)[0], rtol=1e-6)
    _, taps = tapax.capture(step, values=None, grads={"h": tapax.reduce.cosine})(X)
    h, grad = jnp.sin(X), scaled(1)[1]
    cosine = jnp.vdot(h, grad) / jnp.linalg.norm(h) / jnp.linalg.norm(grad)
    np.testing.assert_allclose(taps.grads["h"], cosine, rtol=1e-6)


def test_a_program_kept_from_an_edit_is_captured():
    step = jax.grad(keeping_by_jaxpr(net))
    tapax.edit(step, values={"h": 0.0})(X)
    grads, taps = tapax.capture(step)(X)
    np.testing.assert_allclose(grads, scaled(1)[0], rtol=1e-6)
    np.testing.assert_allclose(taps.grads["h"], scaled(1)[1], rtol=1e-6)


@pytest.mark.parametrize("edits", [{"values": {"h": 0.0}}, {"grads": {"h": lambda g: 2 * g}}])
def test_a_kept_derivative_is_not_edited(edits):
    """The derivative of the value without the edit would be wrong."""
    step = keeping_by_jaxpr(jax.grad(net))
    _, taps = tapax.capture(step)(X)
    np.testing.assert_allclose(taps.grads["h"], scaled(1)[1], rtol=1e-6)
    with pytest.raises(tapax.SiteError, match="its derivative was traced during another call"):
        tapax.edit(step, **edits)(X)
    with pytest.raises(tapax.SiteError, match="the gradient was traced during another call"):
        tapax.capture(step, values=None, grads={"h": tapax.reduce.cosine})(X)
    fresh = keeping_by_jaxpr(jax.grad(net))
    if "values" in edits:
        np.testing.assert_allclose(tapax.edit(fresh, **edits)(X), scaled(0)[0], atol=1e-6)
