"""An example of a library, to copy for another: `jax.debug.callback`, called in the layer.

    python -m conformance.run --library conformance.example:Callback

The callback sends every value of the layer to the host when the program computes it. It has no
gradients, and no names.
"""

from __future__ import annotations

from typing import Any

import jax

from conformance import transforms
from conformance.library import Library
from conformance.problem import WEIGHTS, Case, Found, loss_of


class Net:
    """A model whose only layer sends its results to the list `sent`."""

    def __init__(self, body: Any, sent: list[Any]):
        self.body, self.sent = body, sent

    def lin(self, x: Any) -> Any:
        h = x @ WEIGHTS["lin"]
        jax.debug.callback(self.sent.append, h)
        return h


class Callback(Library):
    name = "jax.debug.callback"
    packages = ("jax",)
    modules = ("jax",)

    def missing(self, case: Case, what: str) -> bool:
        if what == "gradient" or case.kind == "shard_map":  # devices send in any order
            return True
        return case.form != "closed" and case.kind not in ("straight", "twice", "shared")

    def value(self, case: Case) -> Found:
        sent: list[Any] = []
        body = case.reference if not case.form else transforms.closed(case.kind)
        net = Net(body, sent)
        loss = jax.jit(lambda x: loss_of(net.body(net, x)))(case.input())
        jax.effects_barrier()
        return Found(loss, {"lin": sent})
