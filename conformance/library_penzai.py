"""penzai: `pz.select` inserts a layer behind the layer of interest.

For values, that is `SaveIntermediate` from penzai's toolshed. penzai has no tool for gradients, but
`pz.select` can insert a layer that adds a zero parameter, and take the gradient of that. If a
transformation is around the model, `stateless_call` runs inside of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.nn.layer_stack import LayerStackVarBehavior
from penzai.toolshed.gradient_checkpointing import Checkpointed
from penzai.toolshed.jit_wrapper import Jitted
from penzai.toolshed.save_intermediates import SaveIntermediate

from conformance import transforms
from conformance.framework import Broken, failing
from conformance.library import Library
from conformance.problem import LENGTH, STACK, WEIGHTS, WIDTH, Case, Found, loss_of, straight


@pz.pytree_dataclass
class Dense(pz.nn.Layer):
    w: Any

    def __call__(self, x: Any, **_: Any) -> Any:
        if isinstance(x, pz.nx.NamedArrayBase):
            return pz.nx.nmap(jnp.dot)(x.untag("d"), self.w.value.untag("in", "out")).tag("d")
        return x @ self.w.value


@pz.pytree_dataclass
class AddZero(pz.nn.Layer):
    zero: Any

    def __call__(self, x: Any, **_: Any) -> Any:
        return x + self.zero.value


@pz.pytree_dataclass
class Net(pz.nn.Layer):
    lin: Any
    body: Any = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, x: Any, **_: Any) -> Any:
        return self.body(self, x)


@pz.pytree_dataclass
class Arms(pz.nn.Layer):
    left: Any
    right: Any

    def __call__(self, x: Any, **_: Any) -> Any:
        return jnp.tanh(self.left(x)) + jnp.tanh(self.right(2.0 * x))


def dense(w: Any, name: str = "lin", axes: Any = ()) -> Dense:
    return Dense(pz.Parameter(value=pz.nx.wrap(w).tag(*axes) if axes else w, label=name))


def tanh() -> Any:
    return pz.nn.Elementwise(jnp.tanh)


def model(case: Case) -> Any:
    kind, _, form = case.name.partition("/")
    lin = dense(WEIGHTS["lin"].astype(case.dtype))
    body: Any = straight
    if case.name == "stack/lifted":
        one = pz.nn.Sequential([dense(STACK, axes=("layer", "in", "out")), tanh()])
        return pz.nn.LayerStack(one, stack_axis="layer", stack_axis_size=LENGTH)
    if kind == "unedited":
        return pz.nn.Sequential([lin, tanh(), dense(WEIGHTS["head"], "head")])
    if kind == "shared":
        return Arms(lin, lin)
    if form in ("closed", "argument"):
        body = getattr(transforms, form)(kind)
    elif kind in ("twice", "broadcast"):
        body = case.reference
    elif kind == "nested":
        body = _nested
    elif case.name == "jit/lifted":
        lin = Jitted(lin)
    elif case.name == "remat/lifted":
        lin = Checkpointed(lin)
    elif case.name == "stack/raw":
        lin = dense(STACK)
    elif case.name == "vmap/lifted":
        lin = dense(WEIGHTS["lin"], axes=("in", "out"))
    return Net(lin, body)


def inserted(case: Case, net: Any, make: Any) -> Any:
    """Return the model with a layer that `make` returns behind every dense layer."""
    count = iter(range(9))
    behind = lambda layer: pz.nn.Sequential([layer, make(case, f"point{next(count)}")])  # noqa: E731
    return pz.select(net).at_instances_of(Dense).apply(behind)


def _save(case: Case, label: str) -> Any:
    if case.name != "stack/lifted":
        return SaveIntermediate()
    axes = {"layerstack_axes": {"layer": LayerStackVarBehavior.PER_LAYER}}
    empty = pz.nx.wrap(jnp.zeros((LENGTH, WIDTH))).tag("layer", "d")
    return SaveIntermediate(pz.StateVariable(value=empty, label=label, metadata=axes))


def _zero(case: Case, label: str) -> Any:
    zero: Any = jnp.zeros(WIDTH, case.dtype)
    if case.name == "stack/lifted":
        zero = pz.nx.wrap(jnp.zeros((LENGTH, WIDTH))).tag("layer", "d")
    elif case.name == "sharded":
        zero = jnp.zeros_like(case.input())
    elif case.name == "vmap/lifted":
        zero = pz.nx.wrap(jnp.zeros((LENGTH, WIDTH))).tag("batch", "d")
    return AddZero(pz.Parameter(value=zero, label=label))


def _input(case: Case) -> Any:
    """Return the input, with named axes if the case is one of penzai's loops."""
    x = case.input()
    if case.name == "stack/lifted":
        return pz.nx.wrap(x).tag("d")
    return pz.nx.wrap(x).tag("batch", "d") if case.name == "vmap/lifted" else x


def _plain(x: Any) -> Any:
    """Remove the names of axes; put the axis of a batch or a stack first."""
    if not isinstance(x, pz.nx.NamedArrayBase):
        return x
    return x.unwrap(*sorted(x.named_shape, key=("batch", "layer", "d").index))


class _Library(Library):
    name = "penzai"
    packages = ("penzai", "jax")
    modules = ("penzai",)

    def missing(self, case: Case, what: str) -> bool:
        kind, _, form = case.name.partition("/")
        if kind in ("rnn", "sum", "tuple", "unknown") or form in ("init", "undeclared"):
            return True
        return form == "lifted" and kind not in ("jit", "vmap", "remat", "stack")

    def value(self, case: Case) -> Found:
        if case.name == "second":
            return _second(_save)
        model, x = _prepared(case), _input(case)
        net = inserted(case, model, _save)
        around = transforms.around(case)
        if case.kind in transforms.TRAIN:
            pure, saved = pz.unbind_state_vars(pz.freeze_params(net))
            before = tuple(v.freeze() for v in saved)

            def forward(m: Any) -> Any:
                out, after = m.stateless_call(before, x)
                return loss_of(out), [v.value for v in after]

            def update(m: Any) -> Any:
                (loss, aux), grads = jax.value_and_grad(forward, has_aux=True)(m)
                return loss, grads, aux

            loss, arrays, _ = transforms.TRAIN[case.kind](update, pure)
            return Found(loss, {"lin": arrays})
        if around:
            pure, saved = pz.unbind_state_vars(pz.freeze_params(net))
            before = tuple(v.freeze() for v in saved)

            def run(m: Any, x: Any, p: Any) -> Any:
                out, after = m.stateless_call(before, x)
                return out, [v.value for v in after]

            out, arrays = around(run, pure, x)
            return Found(loss_of(out), {"lin": arrays})
        step = lambda net, x: _loss(net(x))  # noqa: E731
        if case.name in JITTED:
            step = pz.variable_jit(step)
            step(net, x)
        if case.kind == "mutated":
            step(net, x)
            model.lin.w.value = 2.0 * WEIGHTS["lin"]
        loss = step(net, x)
        return Found(loss, _by_layer(case, _saved(net)))

    def gradient(self, case: Case) -> Found:
        if case.name == "second":
            return _second(_zero)
        model, x = _prepared(case), _input(case)
        net = inserted(case, model, _zero)
        if case.kind == "mutated":
            model.lin.w.value = 2.0 * WEIGHTS["lin"]
        pure, points = _points(net)
        around = transforms.around(case)
        if around:
            once = {"remat": (WIDTH,), "custom_vjp": (WIDTH,), "shard_map": (2 * WIDTH,)}
            calls = once.get(case.kind, (LENGTH, WIDTH))
            points = [dataclasses.replace(points[0], value=jnp.zeros(calls))]

        def run(m: Any, x: Any, p: Any) -> Any:
            return m.bind_variables([v.unfreeze_as_copy() for v in p])(x), None

        def loss(points: Any) -> Any:
            return _loss((around(run, pure, x, points) if around else run(pure, x, points))[0])

        if case.kind in transforms.TRAIN:

            def update(m: Any) -> Any:
                loss = lambda m, p: loss_of(run(m, x, p)[0])  # noqa: E731
                loss, grads = jax.value_and_grad(loss, argnums=(0, 1))(m, points)
                return loss, grads[0], [g.value for g in grads[1]]

            value, arrays, _ = transforms.TRAIN[case.kind](update, pure)
            return Found(value, {"lin": arrays})
        step = jax.value_and_grad(loss)
        if case.name in JITTED:
            step = jax.jit(step)
            step(points)
        value, grads = step(points)
        return Found(value, _by_layer(case, [_plain(g.value) for g in grads]))


JITTED = ("jit/around", "cached", "jit/ran", "train", "sharded")


def _loss(out: Any) -> Any:
    return loss_of(_plain(out))


def _points(net: Any) -> Any:
    """Split the model into a model without the inserted zeros, and the zeros."""
    is_point = lambda v: str(v.label).startswith("point")  # noqa: E731
    unbound, points = pz.unbind_variables(net, predicate=is_point, freeze=True)
    return pz.freeze_params(unbound), list(points)


def _saved(net: Any) -> list[Any]:
    saves = pz.select(net).at_instances_of(SaveIntermediate).get_sequence()
    return [_plain(save.saved.value) for save in saves]


def _by_layer(case: Case, arrays: list[Any]) -> Any:
    if case.name == "unedited":
        return dict(zip(("lin", "head"), arrays, strict=True))
    return {"lin": arrays}


def _prepared(case: Case) -> Any:
    """Return the model; in one case, after one of its layers raised an exception."""
    if case.name != "exception":
        return model(case)
    body, mend = failing()
    net = Net(dense(WEIGHTS["lin"]), body)
    for make in (_save, _zero):
        with contextlib.suppress(Broken):
            inserted(case, net, make)(case.x)
    mend()
    return net


def _nested(net: Any, x: Any) -> Any:
    """Capture the layer once more, inside of a model that is being captured."""
    lin = pz.nn.Sequential([net.lin, SaveIntermediate()])
    h = lin(x)
    return jnp.tanh(h) + lin.sublayers[-1].saved.value


def _second(make: Any) -> Found:
    case = Case("second", "", straight)
    nets = [inserted(case, Net(dense(WEIGHTS[n]), straight), make) for n in ("lin", "head")]
    parts = [_points(net) for net in nets]

    def loss(points: Any) -> Any:
        outs = [
            pure.bind_variables([v.unfreeze_as_copy() for v in p])(case.x)
            for (pure, _), p in zip(parts, points, strict=True)
        ]
        return loss_of(outs[0] - jnp.tanh(outs[1]))

    if make is _save:
        value = loss_of(nets[0](case.x) - jnp.tanh(nets[1](case.x)))
        found = [_saved(net) for net in nets]
    else:
        value, grads = jax.value_and_grad(loss)([points for _, points in parts])
        found = [[v.value for v in points] for points in grads]
    return Found(value, {"lin": found[0], "teacher": found[1]})


LIBRARY = _Library()
