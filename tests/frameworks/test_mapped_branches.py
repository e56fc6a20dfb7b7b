"""Modules in the branches of a conditional whose predicate differs from example to example."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import tapax
from tests.oracles.closeness import assert_close

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
POSITIVE = X.sum(axis=1) > 0


class NnxBranches(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(4, 4, rngs=rngs)
        self.b = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.branch(x)
        return self.a(x)

    def branch(self, x):
        return lax.cond(jnp.sum(x) > 0, self.a, lambda x: self.a(self.b(x)), x)


class NnxLiftedBranches(NnxBranches):
    def branch(self, x):
        first, second = lambda m, x: m.a(x), lambda m, x: m.a(m.b(x))
        return nnx.cond(jnp.sum(x) > 0, first, second, self, x)


class EquinoxBranches(eqx.Module):
    a: eqx.nn.Linear
    b: eqx.nn.Linear

    def __call__(self, x):
        x = lax.cond(jnp.sum(x) > 0, lambda x: self.a(x), lambda x: self.a(self.b(x)), x)
        return self.a(x)


def nnx_model(cls):
    model = cls(nnx.Rngs(0))
    by_hand = [lambda x, m=m: x @ m.kernel[...] + m.bias[...] for m in (model.a, model.b)]
    lifted = nnx.jit(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0)))
    return lifted, model, by_hand


def equinox_model(cls):
    model = cls(*(eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(2)))
    by_hand = [lambda x, m=m: x @ m.weight.T + m.bias for m in (model.a, model.b)]
    return eqx.filter_jit(lambda m, x: jax.vmap(m)(x)), model, by_hand


MODELS = [
    (nnx_model, NnxBranches),
    (nnx_model, NnxLiftedBranches),
    (equinox_model, EquinoxBranches),
]


@pytest.mark.parametrize(("make", "cls"), MODELS, ids=lambda x: x.__name__)
def test_calls_are_numbered_as_written(make, cls):
    """JAX runs the branch for false first, although the branch for true was written first."""
    fn, model, (a, b) = make(cls)
    chosen = POSITIVE[:, None]
    inner = b(X)
    first, second = a(X), a(inner)
    joined = np.where(chosen, first, second)
    out, taps = tapax.capture(fn)(model, X)
    name = cls.__name__
    assert_close(out, a(joined), 1e-5)
    inside = [path.partition("/")[2] for path in taps.values if "/" in path]
    assert sorted(inside) == ["a", "a@1", "a@2", "b"]
    assert_close(taps.values[f"{name}/a"], np.where(chosen, first, 0), 1e-5)
    assert_close(taps.values[f"{name}/b"], np.where(chosen, 0, inner), 1e-5)
    assert_close(taps.values[f"{name}/a@1"], np.where(chosen, 0, second), 1e-5)
    assert_close(taps.values[f"{name}/a@2"], a(joined), 1e-5)
    assert taps.valid[f"{name}/a"].tolist() == POSITIVE.tolist()
    assert taps.valid[f"{name}/a@1"].tolist() == (~POSITIVE).tolist()

    edited = tapax.edit(fn, values={f"{name}/a@0": lambda x: 3 * x})(model, X)
    assert_close(edited, a(np.where(chosen, 3 * first, second)), 1e-5)
    edited = tapax.edit(fn, values={f"{name}/b": lambda x: 3 * x})(model, X)
    assert_close(edited, a(np.where(chosen, first, a(3 * inner))), 1e-5)


def test_models_in_the_branches():
    m, n = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))

    def run(m, n, x):
        one = lambda x: lax.cond(jnp.sum(x) > 0, m, lambda x: n(m(x)), x)
        return jax.vmap(one)(x)

    taps = tapax.capture(run)(m, n, X)[1]
    chosen, by_hand = POSITIVE[:, None], m(X)
    assert sorted(taps.values) == ["m", "m@1", "n"]
    assert_close(taps.values["m"], np.where(chosen, by_hand, 0), 1e-5)
    assert_close(taps.values["m@1"], np.where(chosen, 0, by_hand), 1e-5)
    assert_close(taps.values["n"], np.where(chosen, 0, n(by_hand)), 1e-5)


def test_a_conditional_in_a_layer_that_is_called_twice():
    model = NnxBranches(nnx.Rngs(0))
    shared = jax.jit(lambda x: model.branch(x))
    run = jax.vmap(lambda x: shared(shared(x)))
    taps = tapax.capture(run)(X)[1]
    a = lambda x: x @ model.a.kernel[...] + model.a.bias[...]
    b = lambda x: x @ model.b.kernel[...] + model.b.bias[...]
    names = [n for n in taps.values if "/a" in n]
    x, found = X, []
    for _ in range(2):
        chosen = x.sum(axis=1, keepdims=True) > 0
        found += [np.where(chosen, a(x), 0), np.where(chosen, 0, a(b(x)))]
        x = np.where(chosen, a(x), a(b(x)))
    by_number = sorted(names, key=lambda name: int(name.partition("@")[2] or 0))
    assert [name.partition("@")[2] for name in by_number] == ["", "1", "2", "3"]
    for name, want in zip(by_number, found, strict=True):
        assert_close(taps.values[name], want, 1e-5)
