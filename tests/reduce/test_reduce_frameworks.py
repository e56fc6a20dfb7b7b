"""Reducers apply to the modules of every framework."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.reduce.test_reduce_programs import R, close, exact

pytestmark = pytest.mark.once

FRAMEWORKS = ["nnx", "nnx scan", "linen", "equinox"]


def model_of(name):
    """Return a framework's step that takes a gradient, and its arguments."""
    x = jnp.sin(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3)
    if name.startswith("nnx"):
        from flax import nnx

        from tests.models.nnx_models import Net, loss

        if name == "nnx":
            return nnx.jit(nnx.grad(loss)), (Net(), x)

        class Stacked(nnx.Module):
            def __init__(self):
                make = nnx.vmap(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)))
                self.layers = make(jax.random.split(jax.random.key(0), 3))

            def __call__(self, x):
                step = lambda x, layer: jnp.tanh(layer(x))
                return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

        return nnx.jit(nnx.grad(loss)), (Stacked(), x)
    if name == "linen":
        from tests.models.linen_models import KEY, MLP

        model = MLP(3)
        params = model.init(KEY, x)
        return jax.jit(jax.grad(lambda p, x: jnp.sum(model.apply(p, x) ** 2))), (params, x)
    import equinox as eqx

    net = eqx.nn.MLP(3, 3, 4, 2, key=jax.random.key(0))
    loss = lambda net, x: jnp.sum(jax.vmap(net)(x) ** 2)
    return eqx.filter_jit(eqx.filter_grad(loss)), (net, x)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_statistics_of_modules_are_those_of_captured_arrays(name):
    """Reduced values equal the statistics of the arrays of a plain capture."""
    step, args = model_of(name)
    _, whole = tapax.capture(step)(*args)
    grads = {"**": [R.rms, R.minmax]}
    out, taps = tapax.capture(step, values={"**": R.rms}, grads=grads)(*args)
    assert set(taps.values) == set(whole.values)
    assert len(whole.values) >= 1
    for n, value in whole.values.items():
        lead = sum(loop.startswith("scan") for loop in whole.sites[n].loops)
        axes = tuple(range(lead, value.ndim))
        close(taps.values[n], np.sqrt((exact(value) ** 2).mean(axes)), 1e-5)
    for n, value in whole.grads.items():
        axes = tuple(range(taps.grads[f"{n}:rms"].ndim, value.ndim))
        close(taps.grads[f"{n}:rms"], np.sqrt((exact(value) ** 2).mean(axes)), 1e-5)
        expected = np.stack([exact(value).min(axes), exact(value).max(axes)], -1)
        close(taps.grads[f"{n}:minmax"], expected)
