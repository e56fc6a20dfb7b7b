"""The cases in Haiku."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import tapax
from conformance.framework import Body, Framework, Program
from conformance.problem import LENGTH, STACK, WEIGHTS, WIDTH, Case, loss_of, recurrent, straight


def linear(name: str) -> Any:
    return hk.Linear(WIDTH, with_bias=False, name=name)


class Net(hk.Module):
    def __init__(self, body: Body, name: str | None = None):
        super().__init__(name=name)
        self.body = body
        self.lin = linear("lin")

    def __call__(self, x: Any) -> Any:
        return self.body(self, x)


class Teacher(Net):
    pass


class Arm(hk.Module):
    def __init__(self, inner: Any, name: str | None = None):
        super().__init__(name=name)
        self.inner = inner

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.inner(x))


class Shared(hk.Module):
    def __init__(self, name: str | None = None):
        super().__init__(name=name)
        inner = linear("lin")
        self.left, self.right = Arm(inner, "left"), Arm(inner, "right")

    def __call__(self, x: Any) -> Any:
        return self.left(x) + self.right(2.0 * x)


class Stacked(hk.Module):
    def __call__(self, x: Any) -> Any:
        return hk.layer_stack(LENGTH, name="layers")(lambda x: jnp.tanh(linear("lin")(x)))(x)


class Recurrent(hk.Module):
    def __call__(self, x: Any) -> Any:
        cell = hk.VanillaRNN(WIDTH, name="cell")
        return hk.dynamic_unroll(cell, x, cell.initial_state(None))[0]


class Totals(hk.Module):
    """A sum over a scan, by `tapax.sow`, since Haiku has no `sow`."""

    def __call__(self, x: Any) -> Any:
        lin = linear("lin")

        def step(state: Any, row: Any) -> Any:
            h = lin(state + row)
            tapax.sow(h, "total", reduce=jnp.add, init=lambda: jnp.zeros(WIDTH))
            return jnp.tanh(h), jnp.tanh(h)

        return hk.scan(step, jnp.zeros(WIDTH), x)[1]


class Pair(hk.Module):
    def __call__(self, x: Any) -> Any:
        h = linear("lin")(x)
        a, b = tapax.perturb((h, 2.0 * h), "pair")
        return a * b


def _vmap(net: Any, x: Any) -> Any:
    return hk.vmap(net.lin, split_rng=False)(x)


def _map(net: Any, x: Any) -> Any:
    return hk.map(net.lin, x)


def _remat(net: Any, x: Any) -> Any:
    return hk.remat(net.lin)(x)


def _scan(net: Any, x: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        state = jnp.tanh(net.lin(state + row))
        return state, state

    return hk.scan(step, jnp.zeros(WIDTH), x)[1]


def _cond(net: Any, x: Any) -> Any:
    return hk.cond(x[0] > -9.0, net.lin, lambda x: x, x)


def _fori_loop(net: Any, x: Any) -> Any:
    return hk.fori_loop(0, 3, lambda _, x: jnp.tanh(net.lin(x)), x)


def _while_loop(net: Any, x: Any) -> Any:
    body = lambda carry: (carry[0] + 1, jnp.tanh(net.lin(carry[1])))  # noqa: E731
    return hk.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]


def transformed(make: Any) -> Any:
    """Return the model as a function of its parameters."""
    return hk.without_apply_rng(hk.transform(lambda x: make()(x))).apply  # noqa: PLW0108


def params(root: str, **weights: Any) -> Any:
    return {f"{root}/{name.replace('.', '/')}": {"w": w} for name, w in weights.items()}


def _program(case: Case, make: Any, variables: Any, reference: Any = None, **sites: Any) -> Program:
    apply = transformed(make)

    def loss(variables: Any, x: Any) -> Any:
        return loss_of(apply(variables, x))

    step = jax.value_and_grad(loss)
    return Program(step, (variables, case.x), sites=sites, reference=reference)


def _train(case: Case) -> Program:
    apply, optimizer = transformed(lambda: Net(straight)), optax.sgd(0.1, momentum=0.9)
    variables = params("net/~", lin=WEIGHTS["lin"])

    @jax.jit
    def step(variables: Any, state: Any, x: Any) -> Any:
        loss = lambda variables: loss_of(apply(variables, x))  # noqa: E731
        value, grads = jax.value_and_grad(loss)(variables)
        updates, state = optimizer.update(grads, state)
        return value, optax.apply_updates(variables, updates), state

    return Program(step, (variables, optimizer.init(variables), case.x), sites={"lin": LIN})


def _second(case: Case) -> Program:
    student, teacher = transformed(lambda: Net(straight)), transformed(lambda: Teacher(straight))
    both = params("net/~", lin=WEIGHTS["lin"]), params("teacher/~", lin=WEIGHTS["head"])

    def loss(both: Any, x: Any) -> Any:
        return loss_of(student(both[0], x) - jnp.tanh(teacher(both[1], x)))

    sites: Any = {"lin": LIN, "teacher": "teacher/lin"}
    return Program(jax.value_and_grad(loss), (both, case.x), sites=sites)


def _rnn(case: Case) -> Program:
    cell = "recurrent/cell/linear", "recurrent/cell/linear_1"
    variables = {
        name: {"w": WEIGHTS[layer], "b": jnp.zeros(WIDTH)}
        for name, layer in zip(cell, ("lin", "head"), strict=True)
    }
    reference = lambda tape, x: recurrent(tape, x, jax.nn.relu)  # noqa: E731
    return _program(
        case, Recurrent, variables, reference, out="recurrent/cell:0", cell="recurrent/cell:1"
    )


def _of(make: Any, variables: Any, **sites: Any) -> Any:
    return lambda case: _program(case, make, variables, **sites)


def _sequential() -> Any:
    return hk.Sequential([linear("lin"), jnp.tanh, linear("head")])


LIN = "net/lin"


class Haiku(Framework):
    name = "Haiku"
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
        "stack/lifted": _of(Stacked, {"stacked/layers/lin": {"w": STACK}}, lin="stacked/lin"),
        "stack/undeclared": _of(Stacked, {"stacked/layers/lin": {"w": STACK}}, lin="stacked/lin"),
        "rnn": _rnn,
        "shared": _of(Shared, params("shared/~", lin=WEIGHTS["lin"]), lin="shared/lin"),
        "unedited": _of(
            _sequential, {k: {"w": w} for k, w in WEIGHTS.items()}, lin="lin", head="head"
        ),
        "sum": _of(Totals, params("totals", lin=WEIGHTS["lin"]), lin="totals/total"),
        "tuple": _of(Pair, params("pair", lin=WEIGHTS["lin"]), pair="pair/pair:"),
    }

    def net(self, body: Body, w: Any) -> Any:
        return params("net/~", lin=w), transformed(lambda: Net(body))


FRAMEWORK = Haiku()
