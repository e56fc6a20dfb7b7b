"""Online learning with unmodified cells of Flax and Equinox."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tapax.hidden import online

I, H, O, B, T = 3, 4, 2, 2, 8

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def widened(tree):
    """Convert numbers to 64 bits."""
    grown = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(grown, tree)


def of_nnx(cell):
    def make():
        graph, weights, rest = nnx.split(
            cell(I, H, rngs=nnx.Rngs(0), param_dtype=jnp.float64), nnx.Param, ...
        )

        def step(p, s, x):
            s, h = nnx.merge(graph, p["cell"], rest)(s, x)
            return s, h @ p["o"]

        return step, weights

    return make


def of_linen(cell):
    def make():
        module = cell(H, param_dtype=jnp.float64)
        carry = module.initialize_carry(jax.random.key(0), (B, I))
        weights = module.init(jax.random.key(1), widened(carry), jnp.ones((B, I)))

        def step(p, s, x):
            s, h = module.apply(p["cell"], s, x)
            return s, h @ p["o"]

        return step, weights

    return make


def of_equinox(cell, pair):
    def make():
        module = widened(eqx.filter(cell(I, H, key=jax.random.key(0)), eqx.is_array))
        weights, static = eqx.partition(module, eqx.is_inexact_array)

        def step(p, s, x):
            s = jax.vmap(eqx.combine(p["cell"], static))(x, s)
            return s, (s[0] if pair else s) @ p["o"]

        return step, weights

    return make


CELLS = {
    "nnx gru": (of_nnx(nnx.GRUCell), 1),
    "nnx lstm": (of_nnx(nnx.LSTMCell), 2),
    "nnx optimized lstm": (of_nnx(nnx.OptimizedLSTMCell), 2),
    "linen gru": (of_linen(nn.GRUCell), 1),
    "linen lstm": (of_linen(nn.OptimizedLSTMCell), 2),
    "linen mgu": (of_linen(nn.MGUCell), 1),
    "equinox gru": (of_equinox(eqx.nn.GRUCell, False), 1),
    "equinox lstm": (of_equinox(eqx.nn.LSTMCell, True), 2),
}


def loss(out, target):
    return ((out - target) ** 2).sum()


def gradients(step, learner, p, s, xs, ys):
    """Compute gradients by the rule, and by backpropagation through time."""

    def total(p):
        def one(carry, xy):
            new, out = step(p, carry, xy[0])
            return new, loss(out, xy[1])

        return jax.lax.scan(one, s, (xs, ys))[1].sum()

    def one(memory, xy):
        return learner.update(memory, p, xy[0], target=xy[1])[::-1]

    memory = learner.init(p, s, xs[0])
    found = jax.lax.scan(one, memory, (xs, ys))[1].grads
    return jax.tree.map(lambda g: g.sum(0), found), jax.grad(total)(p)


def recurrent(path):
    """Return whether a parameter is a matrix from state to state."""
    name = jax.tree_util.keystr(path)
    return any(part in name for part in ("'h", "dense_h", "weight_hh")) and "bias" not in name


FEW = ("nnx gru", "linen lstm", "equinox gru")  # each framework, and one state or two


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.many) for name in CELLS]
)
def test_cells_of_frameworks_learn_online(name):
    make, states = CELLS[name]
    step, weights = make()
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape))
    params = {"cell": weights, "o": array(H, O)}
    state = array(B, H) if states == 1 else (array(B, H), array(B, H))
    args = params, state, array(T, B, I), array(T, B, O)
    found, want = gradients(step, online.d_rtrl(step, loss, indirect="refuse"), *args)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    a, b = flat(found), flat(want)
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.97
    assert not np.allclose(a, b, rtol=1e-3)
    # Without its matrices from state to state, each unit acts only on itself.
    still = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if recurrent(path) and x.ndim == 2 else x, weights
    )
    assert any(not np.any(x) for x in jax.tree.leaves(still) if x.ndim == 2)
    args = {"cell": still, "o": params["o"]}, *args[1:]
    for learner in (online.d_rtrl(step, loss), online.rtrl(step, loss)):
        a, b = map(flat, gradients(step, learner, *args))
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
