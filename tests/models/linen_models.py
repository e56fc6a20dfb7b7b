"""Linen models for the tests, written as users write them."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

X = jax.random.normal(jax.random.key(7), (2, 4), "float32")
KEY = jax.random.key(0)


class MLP(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(self.width)(x))
        return nn.Dense(self.width)(x)


class Setup(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(4), MLP(4)]
        self.heads = {"a": nn.Dense(3), "b": nn.Dense(2)}

    def encode(self, x):
        for layer in self.layers:
            x = nn.tanh(layer(x))
        return x

    def __call__(self, x):
        x = self.encode(x)
        return jnp.concatenate([self.heads["a"](x), self.heads["b"](x)], -1)


class Shared(nn.Module):
    """A model that shares one module between two others, and calls it directly too."""

    class User(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(nn.tanh(self.inner(x)))

    @nn.compact
    def __call__(self, x):
        shared = MLP(name="shared")
        x = self.User(shared, name="left")(x) + self.User(shared, name="right")(2 * x)
        return shared(x)


class Transformer(nn.Module):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attn")(nn.LayerNorm()(x))
            return x + MLP(4, name="mlp")(nn.LayerNorm()(x))

    @nn.compact
    def __call__(self, x):
        x = x[:, :, None] * self.param("embed", nn.initializers.normal(1.0), (4, 4))
        return self.Block(name="layers_0")(x)


class Scan(nn.Module):
    kind: str = "class"

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = x + MLP(name="mlp")(x)
            return x, x.sum()

    @nn.compact
    def __call__(self, x):
        lift = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        if self.kind == "class":
            return nn.scan(self.Layer, **lift)(name="layers")(x, None)[0]
        if self.kind == "remat":
            return nn.scan(nn.remat(self.Layer), **lift)(name="layers")(x, None)[0]
        layer = self.Layer(name="layers")
        return nn.scan(lambda mdl, x, _: mdl(x, None), **lift)(layer, x, None)[0]


class RawScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        mlp = MLP(name="mlp")
        if self.is_initializing():
            return mlp(x)
        return lax.scan(lambda x, _: (x + mlp(x), None), x, None, length=3)[0]


class RNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(4), name="rnn")(x[:, :, None])


class Branches(nn.Module):
    @nn.compact
    def __call__(self, x):
        one, two = MLP(name="one"), nn.Dense(4, name="two")
        if self.is_initializing():
            return one(x) + two(x)
        x = nn.cond(x.sum() > 1e9, lambda m, x: one(x), lambda m, x: two(x), self, x)
        return nn.switch(1, [lambda m, x: x, lambda m, x: one(x), lambda m, x: two(x)], self, x)


class Loop(nn.Module):
    @nn.compact
    def __call__(self, x):
        def body(m, c):
            return c[0] + 1, c[1] + MLP(name="inner")(c[1])

        if self.is_initializing():
            return body(self, (0, x))[1]
        return nn.while_loop(lambda m, c: c[0] < 3, body, self, (0, x))[1]


class Methods(nn.Module):
    def setup(self):
        self.encoder, self.decoder = MLP(), nn.Dense(4)

    def encode(self, x):
        return nn.tanh(self.encoder(self._scaled(x)))

    def decode(self, x):
        return {"mean": self.decoder(x), "parts": (x, 2 * x)}

    def _scaled(self, x):
        return 2 * x

    @nn.nowrap
    def helper(self, x):
        return 3 * x

    def __call__(self, x):
        return self.decode(self.helper(self.encode(x)))["mean"]


def sequential():
    return nn.Sequential([nn.Dense(4), nn.tanh, MLP(), lambda x: 2 * x, nn.Dense(2)])


MODELS = {
    "compact": MLP(),
    "setup": Setup(),
    "shared": Shared(),
    "transformer": Transformer(),
    "sequential": sequential(),
    "methods": Methods(),
    "rnn": RNN(),
    "scan": Scan(),
    "scan of a function": Scan("function"),
    "raw scan": RawScan(),
    "jit": nn.jit(Setup)(),
}

LOOPS = ("rnn", "scan", "scan of a function", "raw scan", "jit")
"""Those with bodies that are traced by themselves."""


def root_of(model):
    return type(model).__name__.removeprefix("Jit")


def loss_of(model):
    return lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)
