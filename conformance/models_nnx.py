"""The cases in Flax NNX."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from conformance.framework import Body, Framework, Program
from conformance.problem import LENGTH, STACK, WEIGHTS, WIDTH, Case, loss_of, straight

# In an older Flax, a `sow` outside of `capture` always changes the model.
_KNOWN = "capture_noop" in inspect.signature(nnx.Module.sow).parameters
IDLE: Any = {"capture_noop": True} if _KNOWN else {}
"""Makes `sow` and `perturb` do nothing outside of `capture`."""


def linear(w: Any, cls: Any = nnx.Linear, **options: Any) -> Any:
    layer = cls(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0), **options)
    layer.kernel = nnx.Param(w)
    return layer


class Net(nnx.Module):
    def __init__(self, body: Body, w: Any, cls: Any = nnx.Linear):
        self.body = body
        self.lin = linear(w, cls)

    def __call__(self, x: Any) -> Any:
        return self.body(self, x)


class Arm(nnx.Module):
    def __init__(self, inner: Any):
        self.inner = inner

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.inner(x))


class Shared(nnx.Module):
    def __init__(self, cls: Any = nnx.Linear):
        inner = linear(WEIGHTS["lin"], cls)
        self.left, self.right = Arm(inner), Arm(inner)

    def __call__(self, x: Any) -> Any:
        return self.left(x) + self.right(2.0 * x)


class Stacked(nnx.Module):
    """Scanned layers; `nnx.scan` maps every variable over them, so nothing has to be declared."""

    def __init__(self, cls: Any = nnx.Linear):
        self.layers = linear(STACK, cls)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, length=LENGTH)
        def scanned(layer: Any, x: Any) -> Any:
            return jnp.tanh(layer(x))

        return scanned(self.layers, x)


class Recurrent(nnx.Module):
    def __init__(self, cls: Any = nnx.SimpleCell):
        cell = cls(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        cell.dense_i.kernel = nnx.Param(WEIGHTS["lin"])
        cell.dense_h.kernel = nnx.Param(WEIGHTS["head"])
        self.rnn = nnx.RNN(cell)

    def __call__(self, x: Any) -> Any:
        return self.rnn(x[None])[0]


class Teacher(Net):
    pass


class Totals(nnx.Module):
    """A sum over a scan, by `sow`."""

    def __init__(self, declared: Any = None):
        self.lin = linear(WEIGHTS["lin"])
        self.axes = nnx.StateAxes({**(declared or {}), ...: None})

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(self.axes, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def step(net: Any, state: Any, row: Any) -> Any:
            h = net.lin(state + row)
            fold = {"reduce_fn": lambda total, h: total + h, "init_fn": lambda: 0.0}
            net.sow(nnx.Intermediate, "total", h, **fold, **IDLE)
            return jnp.tanh(h), jnp.tanh(h)

        return step(self, jnp.zeros(WIDTH), x)[1]


class Pair(nnx.Module):
    def __init__(self) -> None:
        self.lin = linear(WEIGHTS["lin"])

    def __call__(self, x: Any) -> Any:
        h = self.lin(x)
        a, b = self.perturb("pair", (h, 2.0 * h), **IDLE)
        return a * b


def lifted(declared: Any = None) -> dict[str, Body]:
    """Return bodies that use NNX's lifted transformations, with the axes `declared` in them."""
    axes = nnx.StateAxes({**(declared or {}), ...: None})

    def jit(net: Any, x: Any) -> Any:
        return nnx.jit(lambda layer, x: layer(x))(net.lin, x)

    def vmap(net: Any, x: Any) -> Any:
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(axes, 0))(net.lin, x)

    def remat(net: Any, x: Any) -> Any:
        return nnx.remat(lambda layer, x: layer(x))(net.lin, x)

    def scan(net: Any, x: Any) -> Any:
        @nnx.scan(in_axes=(axes, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def step(layer: Any, state: Any, row: Any) -> Any:
            state = jnp.tanh(layer(state + row))
            return state, state

        return step(net.lin, jnp.zeros(WIDTH), x)[1]

    def shard_map(net: Any, x: Any) -> Any:
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        along = dict.fromkeys(declared or (), jax.P("d"))
        spec = nnx.StateSharding({**along, ...: jax.P()})
        specs = {"in_specs": (spec, jax.P("d")), "out_specs": jax.P("d")}
        return nnx.shard_map(lambda layer, x: layer(x), mesh=mesh, **specs)(net.lin, x)

    def cond(net: Any, x: Any) -> Any:
        return nnx.cond(x[0] > -9.0, lambda layer, x: layer(x), lambda layer, x: x, net.lin, x)

    def fori_loop(net: Any, x: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            layer, x = carry
            return layer, jnp.tanh(layer(x))

        return nnx.fori_loop(0, 3, body, (net.lin, x))[1]

    def while_loop(net: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            layer, i, x = carry
            return layer, i + 1, jnp.tanh(layer(x))

        return nnx.while_loop(lambda carry: carry[1] < 3, body, (net.lin, jnp.array(0), x))[2]

    functions = (jit, vmap, remat, scan, shard_map, cond, fori_loop, while_loop)
    return {function.__name__: function for function in functions}


def loss(model: Any, x: Any) -> Any:
    return loss_of(model(x))


def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return (value,)


def _train(case: Case) -> Program:
    model = Net(straight, WEIGHTS["lin"])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    return Program(nnx.jit(train_step), (model, optimizer, case.x))


def _second(case: Case) -> Program:
    student = Net(straight, WEIGHTS["lin"])
    teacher = Teacher(straight, WEIGHTS["head"])

    def step(student: Any, teacher: Any, x: Any) -> Any:
        return nnx.value_and_grad(
            lambda student, teacher: loss_of(student(x) - jnp.tanh(teacher(x))), argnums=(0, 1)
        )(student, teacher)

    sites = {"lin": "Net/lin", "teacher": "Teacher/lin"}
    return Program(step, (student, teacher, case.x), sites=sites)


def _of(make: Any, alone: bool = True, **sites: Any) -> Any:
    step = nnx.value_and_grad(loss)
    return lambda case: Program(step, (make(), case.x), sites=sites, alone=alone)


def sequential() -> Any:
    return nnx.Sequential(linear(WEIGHTS["lin"]), jnp.tanh, linear(WEIGHTS["head"]))


class NNX(Framework):
    name = "NNX"
    lifted = lifted()
    special = {  # noqa: RUF012
        "train": _train,
        "second": _second,
        "stack/lifted": _of(Stacked, lin="Stacked/layers"),
        "stack/undeclared": _of(Stacked, lin="Stacked/layers"),
        "rnn": _of(Recurrent, cell="Recurrent/rnn/cell:0", out="Recurrent/rnn/cell:1"),
        "shared": _of(Shared, lin=("Shared/left/inner", "Shared/right/inner")),
        "unedited": _of(sequential, lin="Sequential/layers/0", head="Sequential/layers/2"),
        "sum": _of(Totals, bool(IDLE), lin="Totals/total"),
        "tuple": _of(Pair, bool(IDLE), pair="Pair/pair:"),
    }

    def net(self, body: Body, w: Any) -> Any:
        return Net(body, w), lambda model, x: model(x)

    def value_and_grad(self, loss: Any) -> Any:
        return nnx.value_and_grad(loss)

    def jit(self, step: Any) -> Any:
        return nnx.jit(step)

    def state(self, model: Any) -> Any:
        return [nnx.state(x) for x in jax.tree.leaves(model, is_leaf=_is_node) if _is_node(x)]


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree)


FRAMEWORK = NNX()
