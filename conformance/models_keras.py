"""The cases in Keras: models called by `stateless_call`, as functions of their weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

import tapax
from conformance.framework import Body, Framework, Program
from conformance.problem import WEIGHTS, WIDTH, Case, loss_of, straight


class Linear(keras.Layer):
    """A dense layer for one example or a batch; `keras.layers.Dense` accepts batches alone."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), name="kernel")

    def call(self, x: Any) -> Any:
        return x @ self.kernel.value


class Net(keras.Model):
    def __init__(self, body: Body, **options: Any):
        super().__init__(**options)
        self.body = body
        self.lin = Linear(name="lin", dtype=options.get("dtype"))

    def build(self, shape: Any) -> None:
        self.lin.build(shape)

    def call(self, x: Any) -> Any:
        return self.body(self, x)


class Arm(keras.Layer):
    def __init__(self, inner: Any, **options: Any):
        super().__init__(**options)
        self.inner = inner

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return jnp.tanh(self.inner(x))


class Shared(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="shared")
        inner = Linear(name="lin")
        self.left, self.right = Arm(inner, name="left"), Arm(inner, name="right")

    def build(self, shape: Any) -> None:
        self.left.build(shape)
        self.right.built = True

    def call(self, x: Any) -> Any:
        return self.left(x) + self.right(2.0 * x)


def _total(net: Any, x: Any) -> Any:
    """A sum over a scan, by `tapax.sow`, since Keras has no `sow`."""

    def step(state: Any, row: Any) -> Any:
        h = net.lin(state + row)
        tapax.sow(h, "total", reduce=jnp.add, init=lambda: jnp.zeros(WIDTH))
        return jnp.tanh(h), jnp.tanh(h)

    return keras.ops.scan(step, jnp.zeros(WIDTH), x)[1]


def _pair(net: Any, x: Any) -> Any:
    h = net.lin(x)
    a, b = tapax.perturb((h, 2.0 * h), "pair")
    return a * b


def _vmap(net: Any, x: Any) -> Any:
    return keras.ops.vectorized_map(net.lin, x)


def _map(net: Any, x: Any) -> Any:
    return keras.ops.map(net.lin, x)


def _remat(net: Any, x: Any) -> Any:
    return keras.remat(net.lin)(x)


def _scan(net: Any, x: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        state = jnp.tanh(net.lin(state + row))
        return state, state

    return keras.ops.scan(step, jnp.zeros(WIDTH), x)[1]


def _cond(net: Any, x: Any) -> Any:
    return keras.ops.cond(x[0] > -9.0, lambda: net.lin(x), lambda: x)


def _fori_loop(net: Any, x: Any) -> Any:
    return keras.ops.fori_loop(0, 3, lambda _, x: jnp.tanh(net.lin(x)), x)


def _while_loop(net: Any, x: Any) -> Any:
    body = lambda i, x: (i + 1, jnp.tanh(net.lin(x)))  # noqa: E731
    return keras.ops.while_loop(lambda i, x: i < 3, body, (0, x))[1]


def stateless(model: Any) -> Any:
    """Return the model as a function of its weights."""
    if not model.built:
        model.build(None)
    fixed = [v.value for v in model.non_trainable_variables]
    return lambda weights, x: model.stateless_call(weights, fixed, x)[0]


def _program(case: Case, model: Any, weights: Any, **sites: Any) -> Program:
    call = stateless(model)
    step = jax.value_and_grad(lambda weights, x: loss_of(call(weights, x)))
    return Program(step, (weights, case.x), sites=sites)


def _of(make: Any, **sites: Any) -> Any:
    return lambda case: _program(case, make(), [WEIGHTS["lin"]], **sites)


def _train(case: Case) -> Program:
    model, optimizer = Net(straight, name="net"), keras.optimizers.SGD(0.1, momentum=0.9)
    call = stateless(model)
    optimizer.build(model.trainable_variables)

    @jax.jit
    def step(weights: Any, state: Any, x: Any) -> Any:
        loss = lambda weights: loss_of(call(weights, x))  # noqa: E731
        value, grads = jax.value_and_grad(loss)(weights)
        return value, optimizer.stateless_apply(state, grads, weights)

    state = [v.value for v in optimizer.variables]
    return Program(step, ([WEIGHTS["lin"]], state, case.x), sites={"lin": LIN})


def _second(case: Case) -> Program:
    student = stateless(Net(straight, name="net"))
    teacher = stateless(Net(straight, name="teacher"))
    both = [WEIGHTS["lin"]], [WEIGHTS["head"]]

    def loss(both: Any, x: Any) -> Any:
        return loss_of(student(both[0], x) - jnp.tanh(teacher(both[1], x)))

    sites: Any = {"lin": LIN, "teacher": "teacher/lin"}
    return Program(jax.value_and_grad(loss), (both, case.x), sites=sites)


def _batched(case: Case, model: Any, weights: Any, **sites: Any) -> Program:
    """Return the program of a model that accepts batches alone, on a batch of one example."""
    model(case.x[None])
    program = _program(case, model, weights, **sites)
    return Program(lambda weights, x: program.step(weights, x[None]), program.args, sites=sites)


def _rnn(case: Case) -> Program:
    cell = keras.layers.SimpleRNNCell(WIDTH, use_bias=False, name="cell")
    model = keras.layers.RNN(cell, return_sequences=True, name="recurrent")
    weights = [WEIGHTS["lin"], WEIGHTS["head"]]
    sites: Any = {"out": "recurrent/cell:0", "cell": "recurrent/cell:1.0"}
    return _batched(case, model, weights, **sites)


def _sequential(case: Case) -> Program:
    dense = lambda name: keras.layers.Dense(WIDTH, use_bias=False, name=name)  # noqa: E731
    parts = [dense("lin"), keras.layers.Activation("tanh"), dense("head")]
    model = keras.Sequential(parts, name="sequential")
    weights = [WEIGHTS["lin"], WEIGHTS["head"]]
    return _batched(case, model, weights, lin="sequential/lin", head="sequential/head")


LIN = "net/lin"


class Keras(Framework):
    name = "Keras"
    lifted = {  # noqa: RUF012
        "vmap": _vmap,
        "map": _map,
        "remat": _remat,
        "scan": _scan,
        "cond": _cond,
        "fori_loop": _fori_loop,
        "while_loop": _while_loop,
    }
    lin = LIN
    arguments = False
    special = {  # noqa: RUF012
        "train": _train,
        "second": _second,
        "rnn": _rnn,
        "shared": _of(Shared, lin="shared/left/lin"),
        "unedited": _sequential,
        "sum": _of(lambda: Net(_total, name="net"), lin="net/total"),
        "tuple": _of(lambda: Net(_pair, name="net"), pair="net/pair:"),
    }

    def net(self, body: Body, w: Any) -> Any:
        return [w], stateless(Net(body, name="net", dtype=str(w.dtype)))


FRAMEWORK = Keras()
