"""nnsight: a `trace` of the unedited model, `.output` for values and `.grad` for gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import nnsight
import torch
from torch import nn

from conformance import models_torch as models
from conformance.library import Library
from conformance.models_torch import COMPILE, Dense, array, loss_of, tensor
from conformance.problem import WEIGHTS, Case, Found, expected


class Net(nn.Module):
    def __init__(self, body: Any, w: Any, teacher: Any = None):
        super().__init__()
        self.body = body
        self.lin = Dense(w)
        self.teacher = None if teacher is None else Dense(teacher)

    def forward(self, x: Any) -> Any:
        out = self.body(self, x)
        if self.teacher is not None:
            out = out - torch.tanh(self.teacher(x))
        return loss_of(out)


class Sequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Dense(WEIGHTS["lin"]), nn.Tanh(), Dense(WEIGHTS["head"]))

    def forward(self, x: Any) -> Any:
        return loss_of(self.layers(x))


class NNsight(Library):
    name = "nnsight"
    packages = ("nnsight", "torch")
    modules = ("nnsight",)

    def missing(self, case: Case, what: str) -> bool:
        return models.missing(case)

    def value(self, case: Case) -> Found:
        return _measure(case, gradient=False)

    def gradient(self, case: Case) -> Found:
        return _measure(case, gradient=True)


def _measure(case: Case, gradient: bool) -> Found:
    body, mend = models.body(case)
    net: Any = Net(body, models.weights(case), WEIGHTS["head"] if case.kind == "second" else None)
    x = tensor(case.input())
    model: Any = net
    if case.kind == "unedited":
        model = Sequential()
    elif case.name in ("cached", "jit/around"):
        model = torch.compile(net, **COMPILE)
        model(x)
    traced = nnsight.NNsight(model)
    parts = _parts(case, traced)
    find = _gradients if gradient else _values
    calls = _calls(case)
    if mend or case.kind == "mutated":
        with contextlib.suppress(Exception):
            find(traced, list(parts.values()), x, calls)
    if mend:
        mend()
    elif case.kind == "mutated":
        models.double(net)
    loss, found = find(traced, list(parts.values()), x, calls)
    if case.kind == "train" and gradient:
        with torch.no_grad():
            net.lin.w -= 0.1 * net.lin.w.grad
    if any(models.escaped(h) for hs in found for h in hs):
        return Found(array(loss), {}, "a tensor escapes from vmap")
    arrays = {layer: [array(h) for h in hs] for layer, hs in zip(parts, found, strict=True)}
    return Found(array(loss), arrays, "no error" if case.refused else "")


def _parts(case: Case, traced: Any) -> dict[str, Any]:
    """Return the traced modules by layer."""
    if case.refused:
        return {"lin": traced.absent}
    if case.kind == "unedited":
        return {"lin": traced.layers[0], "head": traced.layers[2]}
    root = traced._orig_mod if case.name in ("cached", "jit/around") else traced
    if case.kind == "second":
        return {"lin": root.lin, "teacher": root.teacher}
    return {"lin": root.lin}


def _calls(case: Case) -> int:
    """Return how often the program calls a layer: `torch.func.vmap` calls it once for all rows."""
    if case.kind == "broadcast":
        return 2
    loops = case.kind in ("scan", "map", "fori_loop", "while_loop", "twice", "shared")
    return len(expected(case).values["lin"]) if loops else 1


def _values(traced: Any, parts: list[Any], x: Any, calls: int) -> Any:
    if calls == 1:
        with traced.trace(x):
            found = nnsight.save([part.output for part in parts])
            loss = traced.output.save()
        return loss, [[h] for h in found]
    part = parts[0]
    with traced.trace(x) as tracer:
        found = nnsight.save([])
        for _ in tracer.iter[:calls]:
            found.append(part.output)
        loss = traced.output.save()
    return loss, [found]


def _gradients(traced: Any, parts: list[Any], x: Any, calls: int) -> Any:
    if calls == 1:
        with traced.trace(x):
            outs = [part.output for part in parts]
            loss = traced.output.save()
            with loss.backward():
                found = nnsight.save([out.grad for out in outs[::-1]])
        return loss, [[g] for g in found[::-1]]
    part = parts[0]
    with traced.trace(x) as tracer:
        outs = []
        for _ in tracer.iter[:calls]:
            outs.append(part.output)
        loss = traced.output.save()
        with loss.backward():
            found = nnsight.save([out.grad for out in outs[::-1]])
    return loss, [found[::-1]]


LIBRARY = NNsight()
