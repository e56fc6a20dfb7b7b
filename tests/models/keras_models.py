"""Keras models, written as users write them."""

import jax
import keras
import numpy as np
from keras import layers

X = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(3, 2)).astype("float32")


def branched():
    """Make a functional model with a shared layer, a branch, and two outputs."""
    x = keras.Input((4,), name="x")
    shared = layers.Dense(4, activation="tanh", name="shared")
    once = shared(x)
    twice = shared(once)
    wide = layers.Dense(5, name="wide")(once)
    joined = layers.Concatenate(name="joined")([twice, wide])
    out = layers.Dense(2, name="head")(joined)
    return keras.Model(x, {"out": out, "wide": wide}, name="branched")


class Block(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.inner = layers.Dense(4)
        self.activate = layers.Activation("tanh")

    def call(self, x):
        return self.activate(self.inner(x)) + x


class Net(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.blocks = [Block() for _ in range(2)]
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.5, seed=3)
        self.head = layers.Dense(2)

    def encode(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def call(self, x, training=False):
        x = self.norm(self.encode(x), training=training)
        return self.head(self.drop(x, training=training))


NET_LAYERS = [
    "net/block/dense",
    "net/block/activation",
    "net/block",
    "net/block_1/dense_1",
    "net/block_1/activation_1",
    "net/block_1",
    "net.encode",
    "net/batch_normalization",
    "net/dropout",
    "net/dense_2",
    "net",
]


def run_by_hand(net, x, eps=None):
    """Call the layers of a `Net` one by one at inference, with `eps` added to their results."""
    eps = eps or {}
    seen = {}

    def note(name, value):
        seen[name] = value + eps.get(name, 0.0)
        return seen[name]

    for i, block in enumerate(net.blocks):
        path = "net/block" + (f"_{i}" if i else "")
        suffix = f"_{i}" if i else ""
        h = note(f"{path}/dense{suffix}", block.inner(x))
        h = note(f"{path}/activation{suffix}", block.activate(h))
        x = note(path, h + x)
    x = note("net.encode", x)
    x = note("net/batch_normalization", net.norm(x))
    x = note("net/dropout", net.drop(x))
    return note("net", note("net/dense_2", net.head(x))), seen


def numbers(model):
    """Return the values of all variables, including those of the optimizer and the metrics."""
    found = list(model.variables)
    found += model.optimizer.variables if getattr(model, "optimizer", None) else []
    found += [v for v in model.metrics_variables if not any(v is x for x in found)]
    values = [v._value for v in found]
    assert not any(isinstance(value, jax.core.Tracer) for value in values)
    return [np.asarray(value) for value in values]


def make_twins(make, **compiled):
    """Make two equal models."""
    models = []
    for _ in range(2):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = make()
        model(X)
        if compiled:
            model.compile(**compiled)
        models.append(model)
    return models


def make_sequential():
    return keras.Sequential(
        [
            layers.Dense(4, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=1),
            layers.Dense(2),
        ]
    )
