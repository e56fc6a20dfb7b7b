"""The scope or module path that `find_nonfinite` names: each scope once, in every derivative."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import tapax
from tapax.nonfinite._search import find_nonfinite
from tests.models.next_jax import next_flags

FLAGS = pytest.mark.parametrize("flags", [(), ("jax_remat3",)], ids=["now", "next"])

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


OF_SCOPES = {
    "plain": (block, "net/block"),
    "checkpoint": (jax.checkpoint(block), "net/block"),
    "jit of checkpoint": (jax.jit(jax.checkpoint(block)), "net/block"),
    "checkpoint of jit": (jax.checkpoint(jax.jit(block)), "net/block"),
    "nested checkpoints": (jax.checkpoint(middle(jax.checkpoint(block))), "net/middle/block"),
    "checkpoint of scan": (jax.checkpoint(middle(scanned(block))), "net/middle/block"),
    "scan of checkpoint": (scanned(middle(jax.checkpoint(block))), "net/middle/block"),
    "checkpoint in jit": (jax.jit(middle(jax.checkpoint(block))), "net/middle/block"),
    "scopes of one name": (jax.checkpoint(within("net", block)), "net/net/block"),
}
"""Functions with a remat, and the path of a NaN in their backward pass within the scope `net`."""


@pytest.mark.parametrize(("fn", "path"), OF_SCOPES.values(), ids=OF_SCOPES)
def test_scope_of_a_backward_pass_is_in_the_path_once(fn, path):
    slope = jax.grad(within("net", lambda w: jnp.sum(fn(w, X))))
    found = find_nonfinite(slope)(W)
    assert (found.path, found.operation, found.phase) == (path, "div", "backward")
    found = find_nonfinite(within("step", slope))(W)
    assert (found.path, found.phase) == (f"step/{path}", "backward")
    found = find_nonfinite(jax.grad(lambda w: jnp.sum(slope(w))))(W)
    assert found.path == path


@pytest.mark.parametrize("outer", ["", "step"])
@pytest.mark.parametrize(("fn", "path"), OF_SCOPES.values(), ids=OF_SCOPES)
def test_scope_is_in_the_path_once_with_the_remat_of_the_next_jax(fn, path, outer):
    jax.clear_caches()  # this remat leaves the scopes around it in the jitted functions inside it
    with next_flags(["jax_remat3"]):
        slope = jax.grad(within("net", lambda w: jnp.sum(fn(w, X))))
        found = find_nonfinite(within(outer, slope) if outer else slope)(W)
    assert (found.path, found.phase) == (f"{outer}/{path}".lstrip("/"), "backward")


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


@FLAGS
def test_path_of_a_linen_module_under_remat(flags):
    net = Net()
    params = net.init(jax.random.key(0), X)
    with next_flags(flags):
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


@FLAGS
def test_path_of_an_nnx_module_under_remat(flags):
    with next_flags(flags):
        found = find_nonfinite(nnx.grad(lambda net: jnp.sum(net(X))))(NnxNet(nnx.Rngs(0)))
    assert (found.path, found.phase) == ("NnxNet/b", "backward")
