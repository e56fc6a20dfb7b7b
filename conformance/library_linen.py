"""Flax Linen: `capture_intermediates` for values, `perturb` for gradients.

Values come from the unedited model. For gradients, the layer calls `perturb`, whose zeros `init`
makes; if nobody may edit the layer, `nn.intercept_methods` adds the call. Lifted transformations
declare the collections, unless the case says that nothing is declared.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from conformance import models_linen as models
from conformance import problem, transforms
from conformance.framework import Broken, failing
from conformance.library import Library
from conformance.models_linen import LISTED, Net, params
from conformance.problem import STACK, WEIGHTS, WIDTH, Case, Found, loss_of, straight

CAPTURE = {
    "capture_intermediates": lambda module, method: method == "__call__",
    "mutable": ["intermediates"],
}
KEY = jax.random.key(0)


class Perturbed(nn.Module):
    features: int
    use_bias: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.Dense(self.features, self.use_bias, name="dense")(x)
        return self.perturb("h", h)


class Cell(nn.SimpleCell):
    def __call__(self, carry: Any, x: Any) -> Any:
        h, _ = super().__call__(carry, x)
        return self.perturb("state", h), self.perturb("out", h)


def _nested(net: Any, x: Any) -> Any:
    if net.is_initializing():
        return net.lin(x)
    layer, variables = net.lin.unbind()
    h, inner = layer.apply(variables, x, **CAPTURE)
    return jnp.tanh(h) + inner["intermediates"]["__call__"][0]


def model(case: Case, layer: Any, cell: Any = nn.SimpleCell) -> Any:
    kind, _, form = case.name.partition("/")
    if case.name in ("stack/lifted", "stack/undeclared"):
        return models.Stacked(layer, LISTED if form == "lifted" else None)
    if kind == "rnn":
        return models.Recurrent(cell, LISTED)
    made = {"shared": models.Shared(layer), "tuple": models.Pair(), "unedited": models.SEQUENTIAL}
    made["sum"] = models.Totals({"variable_axes": {"intermediates": 0}})
    if kind in made:
        return made[kind]
    body = straight
    if form == "closed":
        body = transforms.closed(kind)
    elif form in ("lifted", "undeclared"):
        body = models.lifted(LISTED if form == "lifted" else None)[kind]
    elif kind == "nested":
        body = _nested
    elif kind in ("twice", "broadcast"):
        body = case.reference
    # Linen's documentation asks to initialize the layers of a branch or a loop outside of it.
    raw = form == "closed" or case.name in ("cond/lifted", "while_loop/lifted")
    return Net(body, layer, raw=raw)


def weights(case: Case, edited: bool) -> Any:
    kind = case.name.partition("/")[0]
    lin = STACK if kind == "stack" else WEIGHTS["lin"].astype(case.dtype)
    if kind == "rnn":
        return models.recurrent()["params"]
    if kind == "unedited":
        return params({"layers_0": lin, "layers_2": WEIGHTS["head"]})["params"]
    layer: Any = {"dense": lin} if edited and kind != "tuple" else lin
    if case.name in ("stack/lifted", "stack/undeclared"):
        return params({"layers": {"lin": layer}})["params"]
    return params({"lin": layer})["params"]


PARTS = {
    "unedited": {"lin": "layers_0", "head": "layers_2"},
    "sum": {"lin": "total"},
    "tuple": {"pair": "pair"},
}


def arrays(case: Case, tree: Any) -> Any:
    """Return the arrays of a collection, by layer."""
    parts = PARTS.get(case.name, {"lin": "lin"})
    if case.name == "rnn":
        parts = {"cell": "state", "out": "out"}
        if "__call__" in str(jax.tree.structure(tree)):
            parts = {"cell": "cell/__call__/0/0", "out": "cell/__call__/0/1"}
    leaves = [
        (jax.tree_util.keystr(keys, simple=True, separator="/"), leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return {layer: [x for path, x in leaves if part in path] for layer, part in parts.items()}


class _Library(Library):
    name = "Flax Linen"
    packages = ("flax", "jax")
    modules = ("flax",)

    def missing(self, case: Case, what: str) -> bool:
        kind, _, form = case.name.partition("/")
        if form == "argument" or (form == "lifted" and kind in ("map", "shard_map", "fori_loop")):
            return True
        if what == "gradient":
            return False
        return case.name in ("unknown", "tuple", "bf16/init", "batch/init")

    def value(self, case: Case) -> Found:
        x = case.input()
        net, w = model(case, nn.Dense), {"params": weights(case, edited=False)}
        if case.name == "second":
            return _second(gradient=False)
        if case.name == "exception":
            body, mend = failing()
            net = Net(body)
            with contextlib.suppress(Broken):
                net.apply(w, x, **CAPTURE)
            mend()
        around = transforms.around(case)

        def forward(w: Any, x: Any) -> Any:
            if around:
                out, state = around(lambda m, x, p: net.apply(m, x, **CAPTURE), w, x)
            else:
                out, state = net.apply(w, x, **CAPTURE)
            return loss_of(out), state

        if case.name == "keyword":
            loss, state = (lambda x, *, variables: forward(variables, x))(x, variables=w)
        elif case.name == "train":
            loss, state = _train(case, net, w["params"], None, x)[0]
        elif case.kind in transforms.TRAIN:
            loss, (state, _), _ = _train_loop(case, net, w["params"], None, x)
        elif case.kind == "mutated":
            forward(w, x)
            loss, state = forward(jax.tree.map(lambda w: 2.0 * w, w), x)
        else:
            if case.name in ("jit/around", "cached", "jit/ran", "sharded"):
                forward = jax.jit(forward)
            for _ in range(1 + (case.name in ("cached", "jit/ran"))):
                loss, state = forward(w, x)
        return Found(loss, arrays(case, state["intermediates"]))

    def gradient(self, case: Case) -> Found:
        x = case.input()
        if case.name == "second":
            return _second(gradient=True)
        if case.name == "unedited":
            with nn.intercept_methods(_intercept):
                return self._gradient(case, x)
        return self._gradient(case, x)

    def _gradient(self, case: Case, x: Any) -> Found:
        net, w = model(case, Perturbed, Cell), weights(case, edited=True)
        first_x = x
        if case.name == "exception":
            body, mend = failing()
            net = Net(body, Perturbed)
            with contextlib.suppress(Broken):
                net.init(KEY, x)
            mend()
        elif case.name == "bf16/init":
            first_x = case.x
        elif case.name == "batch/init":
            first_x = x[:1]
        around = transforms.around(case)
        if around:
            zeros = {"mutable": ["perturbations"]}
            first = lambda m, x, p: net.apply({"params": m}, x, **zeros)  # noqa: E731
            points = around(first, w, x)[1]["perturbations"]
        elif case.name == "bf16":
            points = net.apply({"params": w}, x, mutable=["perturbations"])[1]["perturbations"]
        else:
            points = net.init(KEY, first_x).get("perturbations", {})
        if case.name == "unknown":
            points = {"absent": {"h": jnp.zeros(WIDTH)}}
        if case.kind in transforms.TRAIN:
            loss, (_, (_, grads)), _ = _train_loop(case, net, w, points, x)
            return Found(loss, arrays(case, grads))
        if case.name == "train":
            (loss, _), (_, grads) = _train(case, net, w, points, x)
            return Found(loss, arrays(case, grads))

        def loss(w: Any, points: Any) -> Any:
            apply = lambda m, x, p: (net.apply({"params": m, "perturbations": p}, x), None)  # noqa: E731
            return loss_of((around or _call)(apply, w, x, points)[0])

        step = jax.value_and_grad(loss, argnums=(0, 1))
        if case.name in ("jit/around", "cached", "jit/ran", "sharded"):
            step = jax.jit(step)
            step(w, points)
        if case.kind == "mutated":
            step(w, points)
            w = jax.tree.map(lambda w: 2.0 * w, w)
        value, (_, grads) = step(w, points)
        return Found(value, arrays(case, grads), "no error" if case.refused else "")


def _call(run: Any, m: Any, x: Any, p: Any) -> Any:
    return run(m, x, p)


def _intercept(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
    out = run(*args, **kwargs)
    if isinstance(context.module, nn.Dense) and context.method_name == "__call__":
        return context.module.perturb("h", out)
    return out


def _train(case: Case, net: Any, w: Any, points: Any, x: Any) -> Any:
    optimizer = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def step(w: Any, points: Any, state: Any, x: Any) -> Any:
        out, grads = _both(net, w, points, x)
        updates, state = optimizer.update(grads[0], state)
        return out, grads, optax.apply_updates(w, updates), state

    return step(w, points, optimizer.init(w), x)[:2]


def _both(net: Any, w: Any, points: Any, x: Any) -> Any:
    """Return the loss with the intermediates, and the gradients of weights and perturbations."""

    def loss(w: Any, points: Any) -> Any:
        variables = {"params": w} if points is None else {"params": w, "perturbations": points}
        out, state = net.apply(variables, x, **CAPTURE)
        return loss_of(out), state

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, points)


def _train_loop(case: Case, net: Any, w: Any, points: Any, x: Any) -> Any:
    """Train in a loop whose body captures; carry the collections out of it."""

    def step(w: Any) -> Any:
        (loss, state), grads = _both(net, w, points, x)
        return loss, grads[0], (state, grads)

    return transforms.TRAIN[case.kind](step, w)


def _second(gradient: bool) -> Found:
    student, teacher = Net(straight, Perturbed), models.Teacher(straight, Perturbed)
    both = [params({"lin": {"dense": WEIGHTS[name]}})["params"] for name in ("lin", "head")]
    points = [net.init(KEY, problem.ONE)["perturbations"] for net in (student, teacher)]

    def loss(points: Any) -> Any:
        outs, states = [], []
        for net, w, p in zip((student, teacher), both, points, strict=True):
            out, state = net.apply({"params": w, "perturbations": p}, problem.ONE, **CAPTURE)
            outs.append(out)
            states.append(state["intermediates"]["lin"]["__call__"])
        return loss_of(outs[0] - jnp.tanh(outs[1])), states

    (value, states), grads = jax.value_and_grad(loss, has_aux=True)(points)
    found = grads if gradient else states
    return Found(value, {"lin": found[0], "teacher": found[1]})


LIBRARY = _Library()
