"""Models of brainstate, and their values, states and gradients computed by hand.

The oracles are the step without a capture, layers called one by one, and gradients by a zero
added to the result of a layer.
"""

import brainstate as bs
import jax
import jax.numpy as jnp
import numpy as np
from brainstate import nn
from brainstate import transform as tf

from tests.oracles.closeness import assert_close

KEY = jax.dtypes.prng_key


class Net(nn.Module):
    """A model with layers in a list and a dict, a shared layer and a cell; `probe` sees results."""

    def __init__(self, cell=nn.GRUCell):
        super().__init__()
        self.layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)]
        self.named = {"a/b": nn.LayerNorm(4)}
        self.cell = cell(4, 5)
        self.head = nn.Linear(5, 2)
        self.probe = lambda x, name: x

    def update(self, x):
        for i, layer in enumerate(self.layers):
            x = self.probe(layer(x), f"layers/{i}")
        x = self.probe(self.named["a/b"](x), "named/a%2Fb")
        return self.probe(self.head(self.probe(self.cell.update(x), "cell")), "head")

    def encode(self, x):
        return self.layers[0](x)


def make(cls=Net, *args, batch=2):
    bs.random.seed(0)
    model = cls(*args)
    nn.init_all_states(model, batch)
    bs.random.seed(1)
    return model


def data(steps=3, batch=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(steps, batch, 3)), float)


def values_of(model):
    states = {**model.states(), ("rng",): bs.random.DEFAULT}
    return {k: jax.tree.map(bits, s.value) for k, s in states.items()}


def bits(x):
    x = jnp.asarray(x)
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, KEY) else x)


def same(a, b, tol=0.0):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and not isinstance(x, jax.core.Tracer)
        assert_close(np.asarray(x, np.float64), np.asarray(y, np.float64), tol)


def sgd(model, loss, xs):
    params = model.states(bs.ParamState)
    grads, value = tf.grad(loss, params, return_value=True)(xs)
    for path, state in params.items():
        state.value = jax.tree.map(lambda p, g: p - 0.1 * g, state.value, grads[path])
    return value


def rollout(model, xs):
    return tf.for_loop(model.update, xs)


def loss(model, xs):
    return (rollout(model, xs) ** 2).mean()


def train_step(model, xs):
    return sgd(model, lambda xs: loss(model, xs), xs)


def seen_by_hand(model, run):
    """Compute the result of each layer, iteration by iteration, in plain Python."""
    seen = {}
    model.probe = lambda x, name: seen.setdefault(name, []).append(np.asarray(x)) or x
    with jax.disable_jit():
        out = run(model)
    model.probe = lambda x, name: x
    return out, {name: np.stack(xs) for name, xs in seen.items()}


def grads_by_hand(model, xs, loss):
    """Compute the gradient by a zero added to the result of each layer at each step."""
    start = {path: state.value for path, state in model.states().items()}

    def restored():
        model.probe = lambda x, name: x
        for path, state in model.states().items():
            vars(state)["_value"] = start[path]

    def perturbed(zeros):
        restored()
        left = {name: list(z) for name, z in zeros.items()}
        model.probe = lambda x, name: x + left[name].pop(0)
        with jax.disable_jit(), bs.StateTraceStack():
            return loss(model, xs)

    _, seen = seen_by_hand(model, lambda m: loss(m, xs))
    found = jax.grad(perturbed)({name: jnp.zeros_like(x) for name, x in seen.items()})
    restored()
    return found


def from_the_start(model, xs):
    nn.init_all_states(model, xs.shape[1])
    return rollout(model, xs)


class Counter(nn.Module):
    """A layer that counts its calls."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.calls = bs.ShortTermState(jnp.zeros(()))

    def update(self, x):
        self.calls.value = self.calls.value + x.sum()
        return jnp.tanh(self.lin(x) + self.calls.value)
