"""The cases for libraries that find operations instead of layers: torchlens and jax-tap.

The programs are those of Equinox. Every layer is one matrix product, so the results of the layers
are the results of the primitive `dot_general`, in the order of the program.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from conformance import models_equinox as models
from conformance import transforms
from conformance.framework import Program
from conformance.problem import RATE, WEIGHTS, Case, loss_of, straight

PRIMITIVE = "dot_general"
_LAYERS = {"unedited": ("lin", "head"), "second": ("lin", "teacher")}


def missing(case: Case) -> bool:
    """Return whether a case has no program in which every layer is one matrix product."""
    return case.kind in ("rnn", "sum", "tuple", "nested") or not models.FRAMEWORK.has(case)


def program(case: Case) -> Program:
    """Return a program of arrays that returns the loss alone.

    It computes a gradient only if the case has one inside.
    """
    x, w = case.input(), WEIGHTS["lin"]
    net = models.Net(straight, w)
    if case.kind == "second":
        nets = net, models.Teacher(straight, WEIGHTS["head"])
        return Program(lambda m, x: loss_of(m[0](x) - jnp.tanh(m[1](x))), (nets, x))
    if case.name in ("cached", "jit/around", "sharded"):
        jitted = jax.jit(models.loss)
        return Program(lambda m, x: jitted(m, x), (net, x), ran=case.kind == "cached")  # noqa: PLW0108
    if case.name == "jit/ran":
        closed = jax.jit(lambda x: net(x))  # noqa: PLW0108
        return Program(lambda x: loss_of(closed(x)), (x,), ran=True)
    if case.kind == "mutated":
        held = [net]
        change = lambda: held.__setitem__(0, models.Net(straight, 2.0 * w))  # noqa: E731
        return Program(lambda x: models.loss(held[0], x), (x,), between=change)
    if case.kind == "train":
        jitted_step = jax.jit(_step)
        return Program(lambda m, x: jitted_step(m, x)[0], (net, x))
    built = models.FRAMEWORK.build(dataclasses.replace(case, backward=False))
    if case.kind in transforms.TRAIN:
        return Program(lambda m, x: built.step(m, x)[0], built.args)
    if case.kind in ("shared", "unedited"):
        # The models have functions among their leaves, which JAX does not take as arguments.
        arrays, rest = eqx.partition(built.args[0], eqx.is_array)
        return Program(lambda m, x: models.loss(eqx.combine(m, rest), x), (arrays, x))
    return built


def _step(model: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(models.loss)(model, x)
    return value, jax.tree.map(lambda w, g: w - RATE * g, model, grads)


def has_gradient(case: Case) -> bool:
    """Return whether the program of a case computes a gradient, by more matrix products."""
    return case.kind in ("train", "train_scan", "train_while")


def by_layer(case: Case, arrays: list[Any]) -> dict[str, list[Any]]:
    """Assign results in the order of the program to layers."""
    if case.kind in _LAYERS and len(arrays) == 2:
        return {layer: [x] for layer, x in zip(_LAYERS[case.kind], arrays, strict=True)}
    return {"lin": arrays}
