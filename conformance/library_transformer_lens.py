"""TransformerLens: a `HookPoint` in the layer, `run_with_cache` for values and gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from conformance import models_torch as models
from conformance.library import Library
from conformance.models_torch import COMPILE, Dense, array, loss_of, tensor
from conformance.problem import WEIGHTS, Case, Found


class Net(HookedRootModule):
    def __init__(self, body: Any, w: Any, teacher: Any = None):
        super().__init__()
        self.body = body
        self.lin = Dense(w, HookPoint)
        self.teacher = None if teacher is None else Dense(teacher, HookPoint)
        self.setup()

    def forward(self, x: Any) -> Any:
        out = self.body(self, x)
        if self.teacher is not None:
            out = out - torch.tanh(self.teacher(x))
        return loss_of(out)


class TransformerLens(Library):
    name = "TransformerLens"
    packages = ("transformer-lens", "torch")
    modules = ("transformer_lens",)

    def missing(self, case: Case, what: str) -> bool:
        return case.kind == "unedited" or models.missing(case)

    def value(self, case: Case) -> Found:
        return _measure(case, "")

    def gradient(self, case: Case) -> Found:
        return _measure(case, "_grad")


def _measure(case: Case, end: str) -> Found:
    body, mend = models.body(case)
    net = Net(body, models.weights(case), WEIGHTS["head"] if case.kind == "second" else None)
    x = tensor(case.input())
    model = net
    if case.name in ("cached", "jit/around"):
        model = torch.compile(net, **COMPILE)
        model(x)
    options: Any = {"names_filter": "absent"} if case.refused else {}
    if mend or case.kind == "mutated":
        with contextlib.suppress(models.Broken):
            model.run_with_cache(x, incl_bwd=True)
    if mend:
        mend()
    elif case.kind == "mutated":
        models.double(net)
    loss, cache = model.run_with_cache(x, incl_bwd=True, **options)
    if case.kind == "train":
        with torch.no_grad():
            net.lin.w -= 0.1 * net.lin.w.grad
    found: Any = {}
    for layer in ("lin", "teacher"):
        name = f"{layer}.point{end}"
        found[layer] = [cache[name]] if name in cache else []
        if any(map(models.escaped, found[layer])):
            return Found(array(loss), {}, "a tensor escapes from vmap")
        found[layer] = list(map(array, found[layer]))
    return Found(array(loss), found, "no error" if case.refused else "")


LIBRARY = TransformerLens()
