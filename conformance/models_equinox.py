"""The cases in Equinox."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax

import tapax
from conformance.framework import Body, Framework, Program
from conformance.problem import WEIGHTS, WIDTH, Case, Tape, loss_of, straight


class Dense(eqx.Module):
    w: Any

    def __call__(self, x: Any) -> Any:
        return x @ self.w


class Net(eqx.Module):
    lin: Dense
    body: Body = eqx.field(static=True)

    def __init__(self, body: Body, w: Any):
        self.body = body
        self.lin = Dense(w)

    def __call__(self, x: Any) -> Any:
        return self.body(self, x)


class Teacher(Net):
    pass


class Arm(eqx.Module):
    inner: Dense

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.inner(x))


class Shared(eqx.Module):
    """Two modules that share a layer through `eqx.nn.Shared`."""

    arms: eqx.nn.Shared

    def __init__(self) -> None:
        arms = Arm(Dense(WEIGHTS["lin"])), Arm(Dense(WEIGHTS["lin"]))
        where = lambda arms: arms[1].inner  # noqa: E731
        self.arms = eqx.nn.Shared(arms, where, lambda arms: arms[0].inner)

    def __call__(self, x: Any) -> Any:
        left, right = self.arms()
        return left(x) + right(2.0 * x)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __init__(self) -> None:
        self.cell = eqx.nn.GRUCell(WIDTH, WIDTH, key=jax.random.key(5))

    def __call__(self, x: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            state = self.cell(row, state)
            return state, state

        return lax.scan(step, jnp.zeros(WIDTH), x)[1]


def _gated(tape: Tape, x: Any) -> Any:
    """Compute a GRU with the weights of the cell above, one operation at a time."""
    cell = Recurrent().cell
    state, out = jnp.zeros(WIDTH), []
    for row in x:
        inputs = jnp.split(cell.weight_ih @ row + cell.bias, 3)
        hidden = jnp.split(cell.weight_hh @ state, 3)
        reset = jax.nn.sigmoid(inputs[0] + hidden[0])
        update = jax.nn.sigmoid(inputs[1] + hidden[1])
        new = jnp.tanh(inputs[2] + reset * (hidden[2] + cell.bias_n))
        state = tape.mark(new + update * (state - new), "cell")
        out.append(state)
    return jnp.stack(out)


class Totals(eqx.Module):
    """A sum over a scan, by `tapax.sow`, since Equinox has no `sow`."""

    lin: Dense

    def __call__(self, x: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            h = self.lin(state + row)
            tapax.sow(h, "total", reduce=jnp.add, init=lambda: jnp.zeros(WIDTH))
            return jnp.tanh(h), jnp.tanh(h)

        return lax.scan(step, jnp.zeros(WIDTH), x)[1]


class Pair(eqx.Module):
    lin: Dense

    def __call__(self, x: Any) -> Any:
        h = self.lin(x)
        a, b = tapax.perturb((h, 2.0 * h), "pair")
        return a * b


def _jit(net: Any, x: Any) -> Any:
    return eqx.filter_jit(net.lin)(x)


def _vmap(net: Any, x: Any) -> Any:
    return eqx.filter_vmap(net.lin)(x)


def _remat(net: Any, x: Any) -> Any:
    return eqx.filter_checkpoint(net.lin)(x)


def loss(model: Any, x: Any) -> Any:
    return loss_of(model(x))


def _of(make: Any, reference: Any = None, **sites: Any) -> Any:
    step = eqx.filter_value_and_grad(loss)
    return lambda case: Program(step, (make(), case.x), sites=sites, reference=reference)


def _train(case: Case) -> Program:
    model, optimizer = Net(straight, WEIGHTS["lin"]), optax.sgd(0.1, momentum=0.9)

    @eqx.filter_jit
    def step(model: Any, state: Any, x: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(model, x)
        updates, state = optimizer.update(grads, state)
        return value, eqx.apply_updates(model, updates), state

    return Program(step, (model, optimizer.init(model), case.x))


def _second(case: Case) -> Program:
    models = Net(straight, WEIGHTS["lin"]), Teacher(straight, WEIGHTS["head"])

    def step(student: Any, teacher: Any, x: Any) -> Any:
        both = lambda models: loss_of(models[0](x) - jnp.tanh(models[1](x)))  # noqa: E731
        return eqx.filter_value_and_grad(both)((student, teacher))

    sites: Any = {"lin": "Net/lin", "teacher": "Teacher/lin"}
    return Program(step, (*models, case.x), sites=sites)


def _linear(w: Any) -> Any:
    layer = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=jax.random.key(0))
    return eqx.tree_at(lambda layer: layer.weight, layer, w.T)


def _sequential() -> Any:
    tanh = eqx.nn.Lambda(jnp.tanh)
    return eqx.nn.Sequential([_linear(WEIGHTS["lin"]), tanh, _linear(WEIGHTS["head"])])


def _layer() -> Dense:
    return Dense(WEIGHTS["lin"])


class Equinox(Framework):
    name = "Equinox"
    lifted = {"jit": _jit, "vmap": _vmap, "remat": _remat}  # noqa: RUF012
    special = {  # noqa: RUF012
        "train": _train,
        "second": _second,
        "rnn": _of(Recurrent, _gated, cell="Recurrent/cell"),
        "shared": _of(Shared, lin=("Shared/arms/pytree/0/inner", "Shared/arms/pytree/1/inner")),
        "unedited": _of(_sequential, lin="Sequential/layers/0", head="Sequential/layers/2"),
        "sum": _of(lambda: Totals(_layer()), lin="Totals/total"),
        "tuple": _of(lambda: Pair(_layer()), pair="Pair/pair:"),
    }

    def net(self, body: Body, w: Any) -> Any:
        return Net(body, w), lambda model, x: model(x)

    def value_and_grad(self, loss: Any) -> Any:
        return eqx.filter_value_and_grad(loss)

    def jit(self, step: Any) -> Any:
        return eqx.filter_jit(step)


FRAMEWORK = Equinox()
