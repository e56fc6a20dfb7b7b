"""Flax NNX: `nnx.capture`, with `sow` and `perturb` written into the layer.

Values come from `sow`, gradients from the four steps in the documentation of `Module.perturb`. If a
transformation is around the model, `capture` runs inside of it, and the transformed function takes
and returns the captured states.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from conformance import models_nnx as models
from conformance import problem, transforms
from conformance.framework import Broken, failing
from conformance.library import Library
from conformance.models_nnx import IDLE, Net
from conformance.problem import STACK, WEIGHTS, Case, Found, loss_of, straight

LIFTED = models.lifted({nnx.Intermediate: 0, nnx.Perturbation: 0})


class Marked(nnx.Linear):
    def __call__(self, x: Any) -> Any:
        h = super().__call__(x)
        self.sow(nnx.Intermediate, "h", h, **IDLE)
        return self.perturb("g", h, **IDLE)


class Cell(nnx.SimpleCell):
    def __call__(self, carry: Any, x: Any) -> Any:
        h, _ = super().__call__(carry, x)
        self.sow(nnx.Intermediate, "state", h, **IDLE)
        self.sow(nnx.Intermediate, "out", h, **IDLE)
        return self.perturb("gstate", h, **IDLE), self.perturb("gout", h, **IDLE)


def _nested(net: Any, x: Any) -> Any:
    h, inner = nnx.capture(net.lin, nnx.Intermediate)(x)
    return jnp.tanh(h) + inner["h"][0]


def model(case: Case, body: Any = None) -> Any:
    kind, _, form = case.name.partition("/")
    w = WEIGHTS["lin"].astype(case.dtype)
    if case.name in ("stack/lifted", "stack/undeclared"):
        return models.Stacked(Marked)
    made = {"rnn": lambda: models.Recurrent(Cell), "shared": lambda: models.Shared(Marked)}
    made |= {
        "sum": lambda: models.Totals({nnx.Intermediate: 0}),
        "tuple": models.Pair,
        "unedited": models.sequential,
    }
    if kind in made:
        return made[kind]()
    if body is None:
        body = straight
        if form in ("closed", "argument"):
            body = getattr(transforms, form)(kind)
        elif form in ("lifted", "undeclared"):
            body = (LIFTED if form == "lifted" else models.lifted())[kind]
        elif kind == "nested":
            body = _nested
        elif kind in ("twice", "broadcast"):
            body = case.reference
    return Net(body, STACK if kind == "stack" else w, Marked)


PARTS = {
    "unedited": {"lin": "layers/0", "head": "layers/2"},
    "stack/lifted": {"lin": "layers"},
    "stack/undeclared": {"lin": "layers"},
    "shared": {"lin": "inner"},
    "rnn": {"cell": "state", "out": "out"},
    "sum": {"lin": "total"},
    "tuple": {"pair": "pair"},
}


def arrays(case: Case, state: Any) -> Any:
    """Return the arrays of a state, by layer."""
    found: dict[str, list[Any]] = {}
    for layer, part in PARTS.get(case.name, {"lin": "lin"}).items():
        found[layer] = [
            leaf
            for keys, leaf in jax.tree_util.tree_leaves_with_path(state)
            if part in jax.tree_util.keystr(keys, simple=True, separator="/")
        ]
    return found


def forward(model: Any, x: Any) -> Any:
    return loss_of(model(x))


def _argument(case: Case, net: Any) -> Any:
    """Return what to pass through a transformation, and a function that makes the model of it.

    `lax.map` closes over the model, which NNX allows for a state that is merged inside.
    """
    if case.kind != "map":
        return net, lambda m: m
    graph, state = nnx.split(net)
    return state, lambda state: nnx.merge(graph, state)


def _left(*models: Any) -> str:
    """Describe what `capture` left on the models."""
    parts = (part for model in models for _, part in nnx.iter_modules(model))
    return "the model stays instrumented" if any(hasattr(p, "__captures__") for p in parts) else ""


class _Library(Library):
    name = "Flax NNX"
    packages = ("flax", "jax")
    modules = ("flax",)

    def missing(self, case: Case, what: str) -> bool:
        if case.name == "map/lifted":
            return True
        if what == "gradient":
            return case.name == "unedited"
        return case.name in ("unknown", "tuple", "bf16/init", "batch/init")

    def value(self, case: Case) -> Found:
        x = case.input()
        if case.name == "second":
            return _second(case, gradient=False)
        if case.name == "exception":
            return _exception(case, gradient=False)
        net = model(case)
        captured = nnx.capture(forward, nnx.Intermediate)
        if case.name == "unedited":
            types = {"method_outputs": nnx.Intermediate}
            captured = nnx.capture(forward, nnx.Intermediate, **types)
        if case.name in ("jit/around", "cached", "sharded"):
            captured = nnx.jit(captured)
        if case.name == "cached":
            captured(net, x)
        if case.kind == "mutated":
            captured(net, x)
            net.lin.kernel[...] = 2.0 * WEIGHTS["lin"]
        around = transforms.around(case)
        if around:
            m, whole = _argument(case, net)
            run = lambda m, x, p: nnx.capture(whole(m), nnx.Intermediate)(x)  # noqa: E731
            out, state = around(run, m, x)
            loss = loss_of(out)
        elif case.name == "keyword":
            loss, state = captured(model=net, x=x)
        elif case.name == "jit/ran":
            cached = jax.jit(lambda x: net(x))  # noqa: PLW0108
            with contextlib.suppress(Exception):
                cached(x)
            loss, state = nnx.capture(lambda net, x: loss_of(cached(x)), nnx.Intermediate)(net, x)
        elif case.name == "train":
            loss, state = _train(case, net, x)[0]
        elif case.kind in transforms.TRAIN:
            loss, (state, _) = _train_loop(case, net, x)
        else:
            loss, state = captured(net, x)
        return Found(loss, arrays(case, state), _left(net))

    def gradient(self, case: Case) -> Found:
        x = case.input()
        if case.name == "second":
            return _second(case, gradient=True)
        if case.name == "exception":
            return _exception(case, gradient=True)
        net = model(case)
        if case.name == "unknown":
            point = nnx.State({"absent": {"g": nnx.Perturbation(jnp.zeros(problem.WIDTH))}})
            gradients(forward, net, x, point)
            return Found(None, {}, "no error")
        if case.kind in transforms.TRAIN:
            loss, (_, grads) = _train_loop(case, net, x)
            return Found(loss, arrays(case, grads), _left(net))
        if case.name == "train":
            (loss, _), grads = _train(case, net, x)
            return Found(loss, arrays(case, grads), _left(net))
        around = transforms.around(case)
        if around:
            m, whole = _argument(case, net)
            first = lambda m, x, p: nnx.capture(whole(m), nnx.Perturbation)(x)  # noqa: E731
            _, points = around(first, m, x)

            def outer(points: Any, m: Any) -> Any:
                run = lambda m, x, p: (nnx.capture(whole(m), init=p)(x), None)  # noqa: E731
                return loss_of(around(run, m, x, points)[0])

            loss, grads = nnx.value_and_grad(outer)(points, m)
            return Found(loss, arrays(case, grads), _left(net))
        fn = forward
        if case.name == "jit/ran":
            cached = jax.jit(lambda x: net(x))  # noqa: PLW0108
            with contextlib.suppress(Exception):
                cached(x)
            fn = lambda net, x: loss_of(cached(x))  # noqa: E731
        first_net, first_x = net, x
        if case.name == "bf16/init":
            first_net, first_x = Net(straight, WEIGHTS["lin"], Marked), case.x
        elif case.name == "batch/init":
            first_x = x[:1]
        elif case.name == "cond/lifted":
            # The branches agree only if both know the point beforehand.
            first_net = Net(straight, WEIGHTS["lin"], Marked)
        if case.name == "keyword":
            nnx.capture(fn, nnx.Perturbation)(model=net, x=x)
        _, points = nnx.capture(fn, nnx.Perturbation)(first_net, first_x)
        step = gradients
        if case.name in ("jit/around", "cached", "sharded"):
            step = nnx.jit(gradients, static_argnums=0)
        if case.name == "cached":
            step(fn, net, x, points)
        if case.kind == "mutated":
            step(fn, net, x, points)
            net.lin.kernel[...] = 2.0 * WEIGHTS["lin"]
        loss, grads = step(fn, net, x, points)
        return Found(loss, arrays(case, grads), _left(net))


def gradients(fn: Any, net: Any, x: Any, points: Any) -> Any:
    """Return the loss and the gradients of the perturbations: steps 2 and 3 in the docs."""

    def loss(net: Any, points: Any, x: Any) -> Any:
        return nnx.capture(fn, init=points)(net, x)

    value, (_, grads) = nnx.value_and_grad(loss, argnums=(0, 1))(net, points, x)
    return value, grads


def _train(case: Case, net: Any, x: Any) -> Any:
    _, points = nnx.capture(forward, nnx.Perturbation)(net, x)
    optimizer = nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, optimizer: Any, points: Any, x: Any) -> Any:
        def loss(net: Any, points: Any) -> Any:
            return nnx.capture(forward, nnx.Intermediate, init=points)(net, x)

        both = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        out, (grads, point_grads) = both(net, points)
        optimizer.update(net, grads)
        return out, point_grads

    return step(net, optimizer, points, x)


def _train_loop(case: Case, net: Any, x: Any) -> Any:
    """Train in a loop whose body captures; carry the states out of it."""
    _, points = nnx.capture(forward, nnx.Perturbation)(net, x)

    def step(net: Any) -> Any:
        def loss(net: Any, points: Any) -> Any:
            return nnx.capture(forward, nnx.Intermediate, init=points)(net, x)

        both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, state), (grads, point_grads) = both(net, points)
        return value, grads, (state, point_grads)

    return transforms.TRAIN[case.kind](step, net)[:2]


def _second(case: Case, gradient: bool) -> Found:
    student = Net(straight, WEIGHTS["lin"], Marked)
    teacher = models.Teacher(straight, WEIGHTS["head"], Marked)

    def both(student: Any, teacher: Any, x: Any) -> Any:
        return loss_of(student(x) - jnp.tanh(teacher(x)))

    if not gradient:
        loss, state = nnx.capture(both, nnx.Intermediate)(student, teacher, case.x)
        return Found(loss, arrays(case, state), _left(student, teacher))
    _, points = nnx.capture(both, nnx.Perturbation)(student, teacher, case.x)

    def outer(points: Any, student: Any, teacher: Any) -> Any:
        return nnx.capture(both, init=points)(student, teacher, case.x)

    loss, grads = nnx.value_and_grad(outer)(points, student, teacher)
    return Found(loss, arrays(case, grads), _left(student, teacher))


def _exception(case: Case, gradient: bool) -> Found:
    body, mend = failing()
    net = Net(body, WEIGHTS["lin"], Marked)
    kind = nnx.Perturbation if gradient else nnx.Intermediate
    with contextlib.suppress(Broken):
        nnx.capture(forward, kind)(net, case.x)
    mend()
    left = _left(net)
    loss, state = nnx.capture(forward, kind)(net, case.x)
    if gradient:
        loss, state = gradients(forward, net, case.x, state)
    return Found(loss, arrays(case, state), left)


LIBRARY = _Library()
