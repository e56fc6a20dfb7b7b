"""Flax NNX's own functions: `nnx.capture`, with `sow` and `perturb` written into the layer.

Values come from `sow`, in one step; gradients from the four steps that the documentation of
`Module.perturb` gives. Where a transformation is around the model, `capture` is inside of it, as it
must be, and its states are results and arguments of the transformed function.
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
from conformance.models_nnx import IDLE, Net
from conformance.problem import STACK, WEIGHTS, Case, Found, loss_of, straight

OWN_BODIES = models.own({nnx.Intermediate: 0, nnx.Perturbation: 0})


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
    if case.name in ("stack/own", "stack/plain"):
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
        elif form in ("own", "plain"):
            body = (OWN_BODIES if form == "own" else models.own())[kind]
        elif kind == "nested":
            body = _nested
        elif kind in ("twice", "broadcast"):
            body = case.reference
    return Net(body, STACK if kind == "stack" else w, Marked)


PARTS = {
    "unedited": {"lin": "layers/0", "head": "layers/2"},
    "stack/own": {"lin": "layers"},
    "stack/plain": {"lin": "layers"},
    "shared": {"lin": "inner"},
    "rnn": {"cell": "state", "out": "out"},
    "sum": {"lin": "total"},
    "tuple": {"pair": "pair"},
}


def arrays(case: Case, state: Any) -> Any:
    """What a state holds, by layer."""
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


def around_model(case: Case) -> Any:
    """The transformation that is around the model."""
    kind, _, form = case.name.partition("/")
    if case.name == "stack/raw":
        return transforms.stack
    return transforms.RAW[kind] if form == "around" and kind != "jit" else None


def _left(*models: Any) -> str:
    """Whether a model has more on it than before."""
    parts = (part for model in models for _, part in nnx.iter_modules(model))
    return "the model stays instrumented" if any(hasattr(p, "__captures__") for p in parts) else ""


class Own:
    name = "Flax NNX"

    def none(self, case: Case, what: str) -> bool:
        if what == "gradient":
            return case.name == "unedited" or not case.backward
        return case.name in ("unknown", "tuple", "bf16/init", "batch/init")

    def value(self, case: Case) -> Found:
        x = case.x.astype(case.dtype)
        if case.name == "second":
            return _second(case, gradient=False)
        if case.name == "exception":
            return _exception(case, gradient=False)
        net = model(case)
        captured = nnx.capture(forward, nnx.Intermediate)
        if case.name == "unedited":
            types = {"method_outputs": nnx.Intermediate}
            captured = nnx.capture(forward, nnx.Intermediate, **types)
        if case.name in ("jit/around", "cached"):
            captured = nnx.jit(captured)
        if case.name == "cached":
            captured(net, x)
        around = around_model(case)
        if around:
            run = lambda m, x, p: nnx.capture(m, nnx.Intermediate)(x)  # noqa: E731
            out, state = around(run, net, x)
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
        else:
            loss, state = captured(net, x)
        return Found(loss, arrays(case, state), _left(net))

    def gradient(self, case: Case) -> Found:
        x = case.x.astype(case.dtype)
        if case.name == "second":
            return _second(case, gradient=True)
        if case.name == "exception":
            return _exception(case, gradient=True)
        net = model(case)
        if case.name == "unknown":
            point = nnx.State({"absent": {"g": nnx.Perturbation(jnp.zeros(problem.WIDTH))}})
            gradients(forward, net, x, point)
            return Found(None, {}, "no error")
        if case.name == "train":
            (loss, _), grads = _train(case, net, x)
            return Found(loss, arrays(case, grads), _left(net))
        around = around_model(case)
        if around:
            first = lambda m, x, p: nnx.capture(m, nnx.Perturbation)(x)  # noqa: E731
            _, points = around(first, net, x)

            def outer(points: Any, net: Any) -> Any:
                run = lambda m, x, p: (nnx.capture(m, init=p)(x), None)  # noqa: E731
                return loss_of(around(run, net, x, points)[0])

            loss, grads = nnx.value_and_grad(outer)(points, net)
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
        elif case.name == "cond/own":
            # The branches agree only if both know the point beforehand.
            first_net = Net(straight, WEIGHTS["lin"], Marked)
        if case.name == "keyword":
            nnx.capture(fn, nnx.Perturbation)(model=net, x=x)
        _, points = nnx.capture(fn, nnx.Perturbation)(first_net, first_x)
        step = gradients
        if case.name in ("jit/around", "cached"):
            step = nnx.jit(gradients, static_argnums=0)
        if case.name == "cached":
            step(fn, net, x, points)
        loss, grads = step(fn, net, x, points)
        return Found(loss, arrays(case, grads), _left(net))


def gradients(fn: Any, net: Any, x: Any, points: Any) -> Any:
    """Steps 2 and 3 of the documentation: the loss, and the gradients of the perturbations."""

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


OWN = Own()
