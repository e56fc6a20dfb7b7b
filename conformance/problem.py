"""The oracle: the weights, the inputs and the plain reference program of every case.

Every model has a layer `lin` that computes `h = x @ w`. A case calls that layer in some way; the
loss is the sum of the sines of the result. The reference of a case is a Python function that runs
one operation at a time and uses no library. It calls the layers of a `Tape`, which records every
result and adds a zero to it: the gradient of the loss with respect to that zero is the gradient of
the layer's result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 3
LENGTH = 4
STEPS = 3
"""The iterations of a loop that trains."""
RATE = 0.1
"""The learning rate of a loop that trains."""
SOLVE = 12
"""The iterations of a solver; more change nothing."""
KEYS = jax.random.split(jax.random.key(0), 4)
WEIGHTS = {"lin": jax.random.normal(KEYS[0], (WIDTH, WIDTH), "float32")}
WEIGHTS["head"] = jax.random.normal(KEYS[1], (WIDTH, WIDTH), "float32")
STACK = jax.random.normal(KEYS[2], (LENGTH, WIDTH, WIDTH), "float32")
ONE = jnp.array([0.3, -0.7, 1.1], jnp.float32)
MANY = jax.random.normal(KEYS[3], (LENGTH, WIDTH), "float32")
LONG = jnp.linspace(-1.0, 1.5, 2 * WIDTH, dtype=jnp.float32)


def loss_of(out: Any) -> Any:
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


class Tape:
    """Layers that record their results and add `zeros` to them."""

    def __init__(self, dtype: Any = jnp.float32, zeros: Any = None):
        self.dtype = dtype
        self.zeros = zeros
        self.values: dict[str, list[Any]] = {}

    def mark(self, x: Any, name: str) -> Any:
        seen = self.values.setdefault(name, [])
        if self.zeros is not None:
            x = x + self.zeros[name][len(seen)]
        seen.append(x)
        return x

    def layer(self, x: Any, w: Any, name: str = "lin") -> Any:
        return self.mark(x @ w.astype(self.dtype), name)

    def lin(self, x: Any) -> Any:
        return self.layer(x, WEIGHTS["lin"])

    def head(self, x: Any) -> Any:
        return self.layer(x, WEIGHTS["head"], "head")


Reference = Callable[[Tape, Any], Any]


@dataclasses.dataclass(frozen=True)
class Expected:
    """The right answer: the loss, and the value and gradient of every call, by layer."""

    loss: Any
    values: dict[str, list[Any]]
    grads: dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: `name` selects the programs, `title` names the row.

    `reference` computes the right answer from `x`, unless `answer` does.

    - `stacked`: the calls are iterations of one site rather than separate calls.
    - `backward`: the program takes the gradient, which needs one that JAX can compute.
    - `last`: a library may return the value of the last iteration alone.
    - `implicit`: the value is the one at the solution of an equation, and the gradient is the
      implicit one.
    - `masked`: a library may return zeros for the rows that skipped the layer.
    - `total`: the library is asked for the sum over all calls.
    - `refused`: the library is asked for a site that does not exist, and has to raise.
    - `sharded`: the program runs on a mesh of two devices with explicit axes.
    """

    name: str
    title: str
    reference: Reference
    x: Any = dataclasses.field(default_factory=lambda: ONE)
    stacked: bool = False
    backward: bool = True
    last: bool = False
    dtype: Any = jnp.float32
    total: bool = False
    refused: bool = False
    implicit: bool = False
    masked: bool = False
    sharded: bool = False
    answer: Callable[[Any], Expected] | None = None

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def form(self) -> str:
        return self.name.partition("/")[2]

    @contextlib.contextmanager
    def context(self) -> Any:
        """Set the mesh of the case while a library is measured."""
        if not self.sharded:
            yield
            return
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            yield

    def input(self) -> Any:
        """Return `x` in the dtype of the case, on its mesh if it has one."""
        x = self.x.astype(self.dtype)
        if not self.sharded:
            return x
        return jax.device_put(x, jax.sharding.PartitionSpec("d"))


@dataclasses.dataclass(frozen=True)
class Found:
    """The answer of a library: the loss, and values or gradients by layer.

    `changed` says what the library did to the program or the model, if anything. `reference`
    replaces the reference of the case, for a model that computes something else.
    """

    loss: Any
    arrays: dict[str, Any]
    changed: str = ""
    reference: Reference | None = None


class Key:
    """An array as the key of a cache, by identity."""

    def __init__(self, array: Any):
        self.array = array

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: Any) -> bool:
        return self.array is other.array


@functools.cache
def _expected(reference: Reference, x: Key, dtype: Any) -> Expected:
    array = jnp.asarray(x.array, dtype)
    tape = Tape(dtype)
    loss = loss_of(reference(tape, array))
    zeros = jax.tree.map(jnp.zeros_like, tape.values)
    grads = jax.grad(lambda zeros: loss_of(reference(Tape(dtype, zeros), array)))(zeros)
    return Expected(loss, tape.values, grads)


def expected(case: Case, reference: Reference | None = None) -> Expected:
    """Compute the right answer of a case."""
    if case.answer:
        return case.answer(case.x)
    return _expected(reference or case.reference, Key(case.x), case.dtype)


def straight(net: Any, x: Any) -> Any:
    return net.lin(x)


def twice(net: Any, x: Any) -> Any:
    return net.lin(jnp.tanh(net.lin(x)))


def broadcast(net: Any, x: Any) -> Any:
    """Call the layer on a batch of 4, then on a batch of 1."""
    first = net.lin(x)
    return jnp.concatenate([first, net.lin(jnp.tanh(x[:1] - first[:1]))])


def each(net: Any, x: Any) -> Any:
    return jnp.stack([net.lin(row) for row in x])


def some(net: Any, x: Any) -> Any:
    """Call the layer on the rows that start with a positive number."""
    return jnp.stack([net.lin(row) if row[0] > 0 else row for row in x])


def few(net: Any, x: Any) -> Any:
    """Call the layer on the rows that start and end with a positive number."""
    return jnp.stack([net.lin(row) if row[0] > 0 and row[-1] > 0 else row for row in x])


def over_time(net: Any, x: Any) -> Any:
    state, out = jnp.zeros(WIDTH), []
    for row in x:
        state = jnp.tanh(net.lin(state + row))
        out.append(state)
    return jnp.stack(out)


def again(net: Any, x: Any, times: int = 3) -> Any:
    for _ in range(times):
        x = jnp.tanh(net.lin(x))
    return x


def solved(net: Any, x: Any) -> Any:
    """Solve `y = tanh(lin(y) + x) / 5` by iteration."""
    y = x
    for _ in range(SOLVE):
        y = 0.2 * jnp.tanh(net.lin(y) + x)
    return y


def halves(net: Any, x: Any) -> Any:
    return jnp.concatenate([net.lin(x[:WIDTH]), net.lin(x[WIDTH:])])


def stack(tape: Tape, x: Any) -> Any:
    for w in STACK:
        x = jnp.tanh(tape.layer(x, w))
    return x


def two_layers(net: Any, x: Any) -> Any:
    return net.head(jnp.tanh(net.lin(x)))


def pair(tape: Tape, x: Any) -> Any:
    h = x @ WEIGHTS["lin"]
    return tape.mark(h, "pair") * tape.mark(2.0 * h, "pair")


def shared(net: Any, x: Any) -> Any:
    return jnp.tanh(net.lin(x)) + jnp.tanh(net.lin(2.0 * x))


def nested(net: Any, x: Any) -> Any:
    """Use the value of the inner capture, so that it is right only if both captures are."""
    h = net.lin(x)
    return jnp.tanh(h) + h


def doubled(tape: Tape, x: Any) -> Any:
    """Compute with the weights that the model has at the second call."""
    return tape.layer(x, 2.0 * WEIGHTS["lin"])


def with_teacher(tape: Tape, x: Any) -> Any:
    return tape.lin(x) - jnp.tanh(tape.layer(x, WEIGHTS["head"], "teacher"))


def recurrent(tape: Tape, x: Any, activation: Any = jnp.tanh) -> Any:
    """Run a recurrent network whose cell returns its state twice: as the carry and as output."""
    state, out = jnp.zeros(WIDTH), []
    for row in x:
        h = activation(row @ WEIGHTS["lin"] + state @ WEIGHTS["head"])
        state = tape.mark(h, "cell")
        out.append(tape.mark(h, "out"))
    return jnp.stack(out)


def trained(x: Any) -> Expected:
    """Train the layer for some steps, with the derivatives written out by hand."""
    w, x = np.asarray(WEIGHTS["lin"]), np.asarray(x)
    values, grads = [], []
    for _ in range(STEPS):
        values.append(x @ w)
        grads.append(np.cos(values[-1]))
        w = w - np.float32(RATE) * np.outer(x, grads[-1])
    return Expected(np.sin(values[-1]).sum(), {"lin": values}, {"lin": grads})
