"""The scope or module path that `find_nonfinite` names: each scope once, in every derivative."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import tapax
from tapax.nonfinite._search import find_nonfinite

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))


def block(w, x):
    with tapax.scope("block"):
        return jnp.sqrt(0 * (x @ w))


def within(name, fn):
    def scoped(*args):
        with tapax.scope(name):
            return fn(*args)

    return scoped


def middle(fn):
    return within("middle", fn)


def scanned(fn):
    return lambda w, x: lax.scan(lambda c, _: (fn(w, c), None), x, None, length=2)[0]


@pytest.mark.parametrize(
    ("fn", "path"),
    [
        (block, "net/block"),
        (jax.checkpoint(block), "net/block"),
        (jax.jit(jax.checkpoint(block)), "net/block"),
        (jax.checkpoint(jax.jit(block)), "net/block"),
        (jax.checkpoint(middle(jax.checkpoint(block))), "net/middle/block"),
        (jax.checkpoint(middle(scanned(block))), "net/middle/block"),
        (scanned(middle(jax.checkpoint(block))), "net/middle/block"),
        (jax.jit(middle(jax.checkpoint(block))), "net/middle/block"),
        (jax.checkpoint(within("net", block)), "net/net/block"),
    ],
    ids=[
        "plain",
        "checkpoint",
        "jit of checkpoint",
        "checkpoint of jit",
        "nested checkpoints",
        "checkpoint of scan",
        "scan of checkpoint",
        "checkpoint in jit",
        "scopes of one name",
    ],
)
def test_scope_of_a_backward_pass_is_in_the_path_once(fn, path):
    slope = jax.grad(within("net", lambda w: jnp.sum(fn(w, X))))
    found = find_nonfinite(slope)(W)
    assert (found.path, found.operation, found.phase) == (path, "div", "backward")
    found = find_nonfinite(within("step", slope))(W)
    assert (found.path, found.phase) == (f"step/{path}", "backward")
    found = find_nonfinite(jax.grad(lambda w: jnp.sum(slope(w))))(W)
    assert found.path == path


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sqrt(0 * nn.Dense(4)(x))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Block)(name="b")(x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Encoder(name="enc")(x)


def test_path_of_a_linen_module_under_remat():
    net = Net()
    params = net.init(jax.random.key(0), X)
    found = find_nonfinite(jax.grad(lambda p: jnp.sum(net.apply(p, X))))(params)
    assert (found.path, found.phase) == ("Net/enc/b", "backward")


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        return jnp.sqrt(0 * self.linear(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.b = NnxBlock(rngs)

    def __call__(self, x):
        return self.b(x)


def test_path_of_an_nnx_module_under_remat():
    found = find_nonfinite(nnx.grad(lambda net: jnp.sum(net(X))))(NnxNet(nnx.Rngs(0)))
    assert (found.path, found.phase) == ("NnxNet/b", "backward")
