"""The cases in brainstate, where functions close over modules instead of taking them."""

from __future__ import annotations

from typing import Any

import brainstate as bs
import jax
import jax.numpy as jnp

import tapax
from conformance.framework import Body, Framework, Program
from conformance.problem import RATE, STEPS, WEIGHTS, WIDTH, Case, loss_of, straight


def linear(w: Any) -> Any:
    # The default initializer cannot run on a mesh.
    layer = bs.nn.Linear(WIDTH, WIDTH, w_init=WEIGHTS["lin"], b_init=None)
    layer.weight.value = {"weight": w}
    return layer


class Net(bs.nn.Module):
    def __init__(self, body: Body, w: Any):
        super().__init__()
        self.body = body
        self.lin = linear(w)

    def __call__(self, x: Any) -> Any:
        return self.body(self, x)


class Teacher(Net):
    pass


class Arm(bs.nn.Module):
    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.inner(x))


class Shared(bs.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = linear(WEIGHTS["lin"])
        self.left, self.right = Arm(inner), Arm(inner)

    def __call__(self, x: Any) -> Any:
        return self.left(x) + self.right(2.0 * x)


class Recurrent(bs.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = bs.nn.ValinaRNNCell(WIDTH, WIDTH, activation="tanh")
        self.cell.W.weight.value = {
            "weight": jnp.concatenate([WEIGHTS["lin"], WEIGHTS["head"]]),
            "bias": jnp.zeros(WIDTH),
        }
        self.cell.init_state()

    def __call__(self, x: Any) -> Any:
        self.cell.reset_state()
        return bs.transform.for_loop(self.cell, x)


class Totals(bs.nn.Module):
    """A sum over a scan, by `tapax.sow`, since brainstate has no `sow`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear(WEIGHTS["lin"])

    def __call__(self, x: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            h = self.lin(state + row)
            tapax.sow(h, "total", reduce=jnp.add, init=lambda: jnp.zeros(WIDTH))
            return jnp.tanh(h), jnp.tanh(h)

        return bs.transform.scan(step, jnp.zeros(WIDTH), x)[1]


class Pair(bs.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = linear(WEIGHTS["lin"])

    def __call__(self, x: Any) -> Any:
        h = self.lin(x)
        a, b = tapax.perturb((h, 2.0 * h), "pair")
        return a * b


def _jit(net: Any, x: Any) -> Any:
    return bs.transform.jit(net.lin)(x)


def _vmap(net: Any, x: Any) -> Any:
    return bs.transform.vmap(net.lin)(x)


def _map(net: Any, x: Any) -> Any:
    return bs.transform.map(net.lin, x)


def _remat(net: Any, x: Any) -> Any:
    return bs.transform.checkpoint(net.lin)(x)


def _scan(net: Any, x: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        state = jnp.tanh(net.lin(state + row))
        return state, state

    return bs.transform.scan(step, jnp.zeros(WIDTH), x)[1]


def _cond(net: Any, x: Any) -> Any:
    return bs.transform.cond(x[0] > -9.0, net.lin, lambda x: x, x)


def _while_loop(net: Any, x: Any) -> Any:
    body = lambda carry: (carry[0] + 1, jnp.tanh(net.lin(carry[1])))  # noqa: E731
    return bs.transform.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]


def _gradient(models: Any, loss: Any) -> Any:
    """Return the step that takes the gradient with respect to the parameters of `models`."""
    leaves = jax.tree.leaves(models, is_leaf=lambda x: isinstance(x, bs.nn.Module))
    states = [model.states(bs.ParamState) for model in leaves]

    def step(*args: Any) -> Any:
        grads, value = bs.transform.grad(loss, states, return_value=True)(*args)
        return value, grads

    return step


def _of(make: Any, reference: Any = None, **sites: Any) -> Any:
    def build(case: Case) -> Program:
        model = make()
        step = _gradient(model, lambda x: loss_of(model(x)))
        return Program(step, (case.x,), sites=sites, reference=reference)

    return build


def _train(case: Case) -> Program:
    model = Net(straight, WEIGHTS["lin"])
    gradient = _gradient(model, lambda x: loss_of(model(x)))
    states = model.states(bs.ParamState)

    @bs.transform.jit
    def step(x: Any) -> Any:
        value, grads = gradient(x)
        for key, state in states.items():
            state.value = jax.tree.map(lambda w, g: w - 0.1 * g, state.value, grads[0][key])
        return value, {key: state.value for key, state in states.items()}

    return Program(step, (case.x,))


def _second(case: Case) -> Program:
    student = Net(straight, WEIGHTS["lin"])
    teacher = Teacher(straight, WEIGHTS["head"])
    step = _gradient((student, teacher), lambda x: loss_of(student(x) - jnp.tanh(teacher(x))))
    sites: Any = {"lin": "Net/lin", "teacher": "Teacher/lin"}
    return Program(step, (case.x,), sites=sites)


def _sequential() -> Any:
    return bs.nn.Sequential(linear(WEIGHTS["lin"]), jnp.tanh, linear(WEIGHTS["head"]))


def _cell(tape: Any, x: Any) -> Any:
    """Run the recurrent network of a cell that returns its state once."""
    state, out = jnp.zeros(WIDTH), []
    for row in x:
        state = jnp.tanh(row @ WEIGHTS["lin"] + state @ WEIGHTS["head"])
        out.append(tape.mark(state, "cell"))
    return jnp.stack(out)


class Brainstate(Framework):
    name = "brainstate"
    lifted = {  # noqa: RUF012
        "jit": _jit,
        "vmap": _vmap,
        "map": _map,
        "remat": _remat,
        "scan": _scan,
        "cond": _cond,
        "while_loop": _while_loop,
    }
    arguments = False
    # JAX takes no gradient of what a `custom_vjp` closes over.
    none = frozenset({"stack/raw", "keyword", "custom_vjp/around"})
    special = {  # noqa: RUF012
        "train": _train,
        "second": _second,
        "rnn": _of(Recurrent, _cell, cell="Recurrent/cell"),
        "shared": _of(Shared, lin=("Shared/left/inner", "Shared/right/inner")),
        "unedited": _of(_sequential, lin="Sequential/layers/0", head="Sequential/layers/2"),
        "sum": _of(Totals, lin="Totals/total"),
        "tuple": _of(Pair, pair="Pair/pair:"),
    }

    def net(self, body: Body, w: Any) -> Any:
        model = Net(body, w)
        self.model = model
        return None, lambda _, x: model(x)

    def value_and_grad(self, loss: Any) -> Any:
        step = _gradient(self.model, lambda x: loss(None, x))
        return lambda _, x: step(x)

    def mutated(self, arg: Any, call: Any, x: Any, sites: Any) -> Program:
        weight = self.model.lin.weight

        def between() -> None:
            weight.value = {"weight": 2.0 * WEIGHTS["lin"]}

        step = _gradient(self.model, lambda x: loss_of(call(None, x)))
        return Program(step, (x,), sites=sites, between=between)

    def training(self, kind: str, loss: Any) -> Any:
        gradient = _gradient(self.model, lambda x: loss(None, x))
        states = self.model.states(bs.ParamState)

        def update(x: Any) -> Any:
            value, grads = gradient(x)
            for key, state in states.items():
                state.value = jax.tree.map(lambda w, g: w - RATE * g, state.value, grads[0][key])
            return value

        def step(_: Any, x: Any) -> Any:
            if kind == "train_scan":
                value = bs.transform.for_loop(lambda _: update(x), jnp.arange(STEPS))[-1]
            else:
                body = lambda carry: (carry[0] + 1, update(x))  # noqa: E731
                going = lambda carry: carry[0] < STEPS  # noqa: E731
                value = bs.transform.while_loop(going, body, (0, 0.0))[1]
            return value, {key: state.value for key, state in states.items()}

        return step

    def jit(self, step: Any) -> Any:
        return bs.transform.jit(step)


FRAMEWORK = Brainstate()
