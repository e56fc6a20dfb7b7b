"""The cases in Flax Linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from conformance.framework import Body, Framework, Program
from conformance.problem import LENGTH, STACK, WEIGHTS, WIDTH, Case, loss_of, straight

DENSE = {"features": WIDTH, "use_bias": False}
LISTED = {"intermediates": 0, "perturbations": 0}
"""The collections that Linen's lifted transformations need declared, and the axis of each."""


class Net(nn.Module):
    """A model of layers that `layer` makes; with `raw`, initialization skips the body."""

    body: Body
    layer: Any = nn.Dense
    raw: bool = False

    def setup(self) -> None:
        self.lin = self.layer(**DENSE)

    def __call__(self, x: Any) -> Any:
        if self.raw and self.is_initializing():
            return self.lin(x.reshape(-1, WIDTH)[0])
        return self.body(self, x)


class Teacher(Net):
    pass


class Arm(nn.Module):
    inner: nn.Module

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.inner(x))


class Shared(nn.Module):
    layer: Any = nn.Dense

    def setup(self) -> None:
        self.lin = self.layer(**DENSE)
        self.left, self.right = Arm(self.lin), Arm(self.lin)

    def __call__(self, x: Any) -> Any:
        return self.left(x) + self.right(2.0 * x)


class Step(nn.Module):
    layer: Any = nn.Dense

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return jnp.tanh(self.layer(**DENSE, name="lin")(x)), None


class Stacked(nn.Module):
    """Scanned layers; `listed` are the collections to declare in addition to the parameters."""

    layer: Any = nn.Dense
    listed: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        axes = {"params": 0, **(self.listed or {})}
        scanned = nn.scan(Step, variable_axes=axes, split_rngs={"params": True}, length=LENGTH)
        return scanned(self.layer, name="layers")(x, None)[0]


class Recurrent(nn.Module):
    cell: Any = nn.SimpleCell
    listed: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        axes = {"variable_axes": self.listed} if self.listed else {}
        return nn.RNN(self.cell(WIDTH, name="cell"), name="rnn", **axes)(x[None])[0]


class Totals(nn.Module):
    """A sum over a scan, by `sow`."""

    listed: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def step(net: Any, state: Any, row: Any) -> Any:
            h = lin(state + row)
            fold = {"reduce_fn": lambda total, h: total + h, "init_fn": lambda: jnp.zeros(WIDTH)}
            net.sow("intermediates", "total", h, **fold)
            return jnp.tanh(h), jnp.tanh(h)

        lin = nn.Dense(**DENSE, name="lin")
        options = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        return nn.scan(step, **options, **(self.listed or {}))(self, jnp.zeros(WIDTH), x)[1]


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.Dense(**DENSE, name="lin")(x)
        a, b = self.perturb("pair", (h, 2.0 * h))
        return a * b


def lifted(listed: Any = None) -> dict[str, Body]:
    """Return bodies that use Linen's lifted transformations, with `listed` declared in them."""
    shared = {"variable_broadcast": "params", "split_rngs": {"params": False}}
    mapped = {"variable_axes": {"params": None, **(listed or {})}, "split_rngs": {"params": False}}

    def jit(net: Any, x: Any) -> Any:
        return nn.jit(lambda net, x: net.lin(x))(net, x)

    def vmap(net: Any, x: Any) -> Any:
        return nn.vmap(lambda net, x: net.lin(x), in_axes=0, **mapped)(net, x)

    def remat(net: Any, x: Any) -> Any:
        return nn.remat(lambda net, x: net.lin(x))(net, x)

    def scan(net: Any, x: Any) -> Any:
        def step(net: Any, state: Any, row: Any) -> Any:
            state = jnp.tanh(net.lin(state + row))
            return state, state

        axes = {"variable_axes": listed} if listed else {}
        return nn.scan(step, **shared, **axes)(net, jnp.zeros(WIDTH), x)[1]

    def cond(net: Any, x: Any) -> Any:
        return nn.cond(x[0] > -9.0, lambda net, x: net.lin(x), lambda net, x: x, net, x)

    def while_loop(net: Any, x: Any) -> Any:
        if net.is_initializing():
            return net.lin(x)
        carried = {"carry_variables": list(listed)} if listed else {}
        done = lambda net, carry: carry[0] < 3  # noqa: E731
        body = lambda net, carry: (carry[0] + 1, jnp.tanh(net.lin(carry[1])))  # noqa: E731
        return nn.while_loop(done, body, net, (0, x), **carried)[1]

    functions = (jit, vmap, remat, scan, cond, while_loop)
    return {function.__name__: function for function in functions}


def params(tree: dict[str, Any]) -> Any:
    """Return variables, with a kernel in the place of every array."""
    wrap = lambda w: {"kernel": w}  # noqa: E731
    return {"params": jax.tree.map(wrap, tree)}


def _program(case: Case, model: Any, variables: Any, **sites: Any) -> Program:
    def loss(variables: Any, x: Any) -> Any:
        return loss_of(model.apply(variables, x))

    return Program(jax.value_and_grad(loss), (variables, case.x), sites=sites)


def _of(model: Any, tree: Any, **sites: Any) -> Any:
    return lambda case: _program(case, model, params(tree), **sites)


def _train(case: Case) -> Program:
    model, optimizer = Net(straight), optax.sgd(0.1, momentum=0.9)
    variables = params({"lin": WEIGHTS["lin"]})

    @jax.jit
    def step(variables: Any, state: Any, x: Any) -> Any:
        loss = lambda variables: loss_of(model.apply(variables, x))  # noqa: E731
        value, grads = jax.value_and_grad(loss)(variables)
        updates, state = optimizer.update(grads, state)
        return value, optax.apply_updates(variables, updates), state

    return Program(step, (variables, optimizer.init(variables), case.x))


def _second(case: Case) -> Program:
    student, teacher = Net(straight), Teacher(straight)
    both = params({"lin": WEIGHTS["lin"]}), params({"lin": WEIGHTS["head"]})

    def loss(both: Any, x: Any) -> Any:
        return loss_of(student.apply(both[0], x) - jnp.tanh(teacher.apply(both[1], x)))

    sites: Any = {"lin": "Net/lin", "teacher": "Teacher/lin"}
    return Program(jax.value_and_grad(loss), (both, case.x), sites=sites)


SEQUENTIAL = nn.Sequential([nn.Dense(**DENSE), jnp.tanh, nn.Dense(**DENSE)])


def recurrent() -> Any:
    """Return the variables of the recurrent model."""
    cell = {"i": {"kernel": WEIGHTS["lin"], "bias": jnp.zeros(WIDTH)}}
    cell["h"] = {"kernel": WEIGHTS["head"]}
    return {"params": {"cell": cell}}


class Linen(Framework):
    name = "Linen"
    lifted = lifted()
    arguments = False
    special = {  # noqa: RUF012
        "train": _train,
        "second": _second,
        "stack/lifted": _of(Stacked(), {"layers": {"lin": STACK}}, lin="Stacked/layers/lin"),
        "stack/undeclared": _of(Stacked(), {"layers": {"lin": STACK}}, lin="Stacked/layers/lin"),
        "rnn": lambda case: _program(
            case, Recurrent(), recurrent(), cell="Recurrent/cell:0", out="Recurrent/cell:1"
        ),
        "shared": _of(Shared(), {"lin": WEIGHTS["lin"]}, lin="Shared/lin"),
        "unedited": _of(
            SEQUENTIAL,
            {"layers_0": WEIGHTS["lin"], "layers_2": WEIGHTS["head"]},
            lin="Sequential/layers_0",
            head="Sequential/layers_2",
        ),
        "sum": _of(Totals(), {"lin": WEIGHTS["lin"]}, lin="Totals/total"),
        "tuple": _of(Pair(), {"lin": WEIGHTS["lin"]}, pair="Pair/pair:"),
    }

    def net(self, body: Body, w: Any) -> Any:
        model = Net(body)
        return params({"lin": w}), model.apply


FRAMEWORK = Linen()
