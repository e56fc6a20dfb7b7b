"""NNX models for the tests, and their inner values and gradients computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.oracles.closeness import assert_close

X = jnp.sin(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.lin(x))


class Net(nnx.Module):
    def __init__(self, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def encode(self, x):
        return self.blocks[1](self.blocks[0](x))


def loss(model, x):
    return jnp.sum(model(x) ** 2)


SITES = {"blocks/0/lin", "blocks/0", "blocks/1/lin", "blocks/1", "head", ""}


def affine(x, lin):
    return x @ lin.kernel[...] + lin.bias[...]


def by_hand(model, x, shift=None):
    """Compute the output of a `Net` and the value of every module, with some shifted."""
    values = {}

    def at(name, value):
        value = value if shift is None else value + shift[name]
        values[name] = value
        return value

    for i, block in enumerate(model.blocks):
        h = at(f"blocks/{i}/lin", affine(x, block.lin))
        x = at(f"blocks/{i}", x + jnp.tanh(h))
    return at("", at("head", affine(x, model.head))), values


def values(model, x):
    return by_hand(model, x)[1]


def grads(model, x):
    """Compute the gradient of `loss` by the value of every module."""
    zeros = jax.tree.map(jnp.zeros_like, values(model, x))
    return jax.grad(lambda shift: jnp.sum(by_hand(model, x, shift)[0] ** 2))(zeros)


def close(a, b, tol=2e-5):
    assert_close(np.asarray(a), np.asarray(b), tol)


def check(found, expected, root="Net", tol=2e-5):
    """Assert that the captured arrays are exactly the expected ones."""
    name = lambda path: f"{root}/{path}" if path else root
    assert set(found) == set(map(name, expected))
    for path, value in expected.items():
        close(found[name(path)], value, tol)


def arrays(objects):
    """Return all state of some objects as NumPy arrays."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    leaves = jax.tree.leaves(nnx.state(objects))
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def classes():
    """Return the attributes of every module class, to compare before and after."""
    found, waiting = {}, [nnx.Module]
    while waiting:
        cls = waiting.pop()
        found[cls] = dict(vars(cls))
        waiting += [sub for sub in type.__subclasses__(cls) if sub not in found]
    return found
