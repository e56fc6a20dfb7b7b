"""Equinox's own while loops and scans, on which diffrax and optimistix are built."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7, 1.2])
STEPS = 3
KINDS = ["lax", "checkpointed", "bounded"]


def loop(kind, mark=lambda h, name: h):
    """Three times `x -> sin(2x)`, in one of Equinox's loops."""

    def run(x):
        body = lambda c: (c[0] + 1, jnp.sin(mark(2 * c[1], "h")))
        bound = {} if kind == "lax" else {"max_steps": 4}
        return eqxi.while_loop(lambda c: c[0] < STEPS, body, (0, x), kind=kind, **bound)[1]

    return lambda x: jnp.sum(run(x) ** 2)


@pytest.mark.parametrize("kind", KINDS)
def test_values_in_an_equinox_loop_agree_with_a_loop_by_hand(kind):
    _, taps = tapax.capture(loop(kind, tapax.sow), values="**")(X)
    last = 2 * jnp.sin(2 * jnp.sin(2 * X))
    name, value = next(iter(taps.values.items()))
    if taps.valid:
        value = value if value.ndim == 1 else value[jnp.flatnonzero(taps.valid[name])[-1]]
    assert_close(jnp.ravel(value)[-3:], last)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_in_an_equinox_loop_changes_the_result(kind):
    edited = tapax.edit(loop(kind, tapax.sow), values={"h": lambda h: 3 * h})
    assert_close(edited(X), loop(kind, lambda h, name: 3 * h)(X))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_gradients_of_an_edited_equinox_loop_are_right_or_refused(kind):
    expected = jax.grad(loop(kind, lambda h, name: 3 * h))(X)
    inside = tapax.edit(jax.grad(loop(kind, tapax.sow)), values={"h": lambda h: 3 * h})
    assert_close(inside(X), expected)
    outside = jax.grad(tapax.edit(loop(kind, tapax.sow), values={"h": lambda h: 3 * h}))
    if kind == "checkpointed":
        with pytest.raises(tapax.SiteError, match="edited inside a function with a derivative"):
            outside(X)
    else:
        assert_close(outside(X), expected)
