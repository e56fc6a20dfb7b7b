"""Modules of NNX that pass several times through a transformation keep their names.

A transformation of NNX returns the Variables of its modules, so the second call takes results of
the first. The oracle is the model without the transformation.
"""

import jax.numpy as jnp
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

X = jnp.ones((2, 3), jnp.float32)


class Block(nnx.Module):
    """A block whose first and last arrays change in every call: a count, and a variance."""

    def __init__(self, rngs):
        self.do = nnx.Dropout(0.5, rngs=rngs)
        self.lin = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.lin(self.do(x)))


class Net(nnx.Module):
    def __init__(self, seed=0, run=None):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.run = run

    def __call__(self, x):
        for block in self.blocks:
            x = block(x) if self.run is None else self.run(block, x)
        return x


class Pair(nnx.Module):
    def __init__(self, seed=0):
        self.p, self.q = (Block(nnx.Rngs(seed + i)) for i in range(2))

    def __call__(self, x):
        return self.q(self.p(x))


def apply(module, x):
    return module(x)


def conditional(module, x):
    return nnx.cond(jnp.all(x < 1e9), apply, lambda module, x: 0 * x, module, x)


TRANSFORMED = {
    "remat": nnx.remat(apply),
    "jit": nnx.jit(apply),
    "cond": conditional,
    "jit of remat": nnx.jit(nnx.remat(apply)),
}


@pytest.fixture(
    params=["remat", "jit", "cond", pytest.param("jit of remat", marks=pytest.mark.many)]
)
def transformed(request):
    return TRANSFORMED[request.param]


def difference(model, x, z):
    return jnp.mean((model(x) - model(z)) ** 2)


def roots(run):
    return lambda policy, value, x: sum(
        jnp.sum(run(model, z) ** 2) for z in (x, 2 * x) for model in (policy, value)
    )


def parts(run):
    return lambda model, x: sum(jnp.sum(run(model.q, run(model.p, z)) ** 2) for z in (x, 2 * x))


def check(fn, plain, make):
    """Check that two functions have the same sites, with the same values and gradients."""
    _, taps = tapax.capture(nnx.grad(fn))(*make())
    _, expected = tapax.capture(nnx.grad(plain))(*make())
    assert list(taps.values) == list(expected.values)
    assert set(taps.grads) == set(expected.grads)
    for name, x in expected.values.items():
        assert_close(taps.values[name], x)
    for name, x in expected.grads.items():
        assert_close(taps.grads[name], x, 1e-4)


def test_blocks_keep_their_names(transformed):
    arguments = X + jnp.eye(2, 3, dtype=X.dtype), 2 * X
    _, taps = tapax.capture(difference)(Net(run=transformed), *arguments)
    _, expected = tapax.capture(difference)(Net(), *arguments)
    assert list(taps.values) == list(expected.values)
    for name, x in expected.values.items():
        assert_close(taps.values[name], x)


def test_edits_and_gradients_cover_every_call_of_a_block(transformed):
    model = lambda: Net(run=transformed)
    zeroed = tapax.edit(difference, values={"Net/blocks/1": 0.0})
    assert zeroed(model(), X, 2 * X) == 0
    _, taps = tapax.capture(nnx.grad(difference))(model(), X, 2 * X)
    assert {"Net/blocks/1", "Net/blocks/1@1"} <= set(taps.grads)


def test_roots_keep_their_names(transformed):
    check(roots(transformed), roots(apply), lambda: (Pair(0), Pair(5), X))


def test_parts_of_a_model_keep_their_names(transformed):
    check(parts(transformed), parts(apply), lambda: (Pair(), X))


def loop(module, x):
    step = lambda _, carry: (carry[0], carry[0](carry[1]))
    return nnx.fori_loop(0, 3, step, (module, x))[1]


def while_loop(module, x):
    step = lambda carry: (carry[0], carry[0](carry[1]), carry[2] + 1)
    return nnx.while_loop(lambda carry: carry[2] < 3, step, (module, x, 0))[1]


@pytest.mark.parametrize("run", [loop, while_loop])
def test_modules_that_loops_carry_keep_their_names(run):
    _, taps = tapax.capture(lambda m, x, z: m(x) + m(z))(Net(run=run), X, 2 * X)
    below = ["", "/do", "/lin", "/norm"]
    blocks = {
        f"Net/blocks/{i}{part}{call}" for i in (0, 1) for part in below for call in ("", "@1")
    }
    assert set(taps.values) == {"Net", "Net@1", *blocks}


def test_an_array_that_blocks_share_does_not_name_them():
    """The shared array is the first of each block, and has its path in the first block."""

    class Sharing(nnx.Module):
        def __init__(self, shared):
            self.a, self.b = shared, nnx.Param(jnp.ones(3))

        def __call__(self, x):
            return self.a[...] * self.b[...] * x

    class Whole(nnx.Module):
        def __init__(self):
            shared = nnx.Param(jnp.ones(3))
            self.blocks = nnx.List([Sharing(shared) for _ in range(2)])

        def __call__(self, x):
            for block in self.blocks:
                x = nnx.remat(apply)(block, x)
            return x

    _, taps = tapax.capture(lambda m, x: m(m(x)))(Whole(), X)
    blocks = {f"Whole/blocks/{i}{call}" for i in (0, 1) for call in ("", "@1")}
    assert set(taps.values) == {"Whole", "Whole@1", *blocks}
