"""Reducers do not store the values that they reduce."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tests.reduce.test_reduce_programs import EDGES, R

pytestmark = pytest.mark.once

WIDTH, LAYERS, BATCH = 64, 12, 256


def deep(remat):
    def layer(c, w):
        a = tapax.sow(c @ w, "a")
        return tapax.sow(jnp.tanh(a), "b"), None

    layer = jax.checkpoint(layer) if remat else layer

    def loss(ws, x):
        return jnp.mean(lax.scan(layer, x, ws)[0] ** 2)

    return jax.value_and_grad(loss), (
        jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH,
        jnp.ones((BATCH, WIDTH)),
    )


def written_out(sow):
    def loss(ws, x):
        for i, w in enumerate(ws):
            x = jnp.tanh(sow(x @ w, f"a{i}"))
        return jnp.mean(x**2)

    return jax.value_and_grad(loss)


def test_layers_written_out_keep_no_scales():
    args = [jnp.ones((WIDTH, WIDTH)) / WIDTH] * 4, jnp.ones((BATCH, WIDTH))
    watched = tapax.capture(written_out(tapax.sow), values={"**": R.rms}, grads={"**": R.rms})
    memory = [
        jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
        for f in (written_out(lambda x, name: x), watched)
    ]
    # Each of the two scales of the squares would be as large as a value.
    assert memory[1] <= memory[0] + args[1].nbytes


def scans(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from scans(inner)


EVERYTHING = {
    "rms": R.rms,
    "totals": [R.rms.total, R.moments.total, R.minmax],
    "distributions": [R.histogram(EDGES), R.topk(4).total, R.rms(axis=-1)],
}


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("which", list(EVERYTHING))
def test_no_value_is_stored(which, remat):
    step, args = deep(remat)
    asked = {"**": EVERYTHING[which]}
    watched = tapax.capture(step, values=asked, grads=asked)
    full = sorted(
        v.aval.shape for eqn in scans(jax.make_jaxpr(step)(*args).jaxpr) for v in eqn.outvars
    )
    found = sorted(
        v.aval.shape for eqn in scans(jax.make_jaxpr(watched)(*args).jaxpr) for v in eqn.outvars
    )
    large = lambda shapes: [s for s in shapes if np.prod(s) >= BATCH * WIDTH]
    assert large(found) == large(full)
    if remat and which == "rms":
        memory = [
            jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
            for f in (step, watched)
        ]
        # Every site would add one value for each layer. How XLA shares buffers, and with it a
        # value or two, depends on the processor.
        assert memory[1] <= memory[0] + LAYERS // 4 * args[1].nbytes
