"""The cases in PyTorch, for the libraries that look inside PyTorch models.

PyTorch has an equivalent of some cases alone: `torch.compile` for `jit`, `torch.func.vmap` for
`vmap`, `torch.utils.checkpoint` for `remat`, and Python's loops and branches for JAX's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.problem import WEIGHTS, WIDTH, Case

Body = Callable[[Any, Any], Any]
# `torch.compile` traces the model as it always does, but leaves out the code generator, which needs
# a C++ compiler and does not change what hooks see.
COMPILE: Any = {"backend": "eager"}


def tensor(x: Any) -> Any:
    """Convert an array of JAX to a tensor."""
    made = torch.tensor(np.asarray(x, np.float32))
    return made.to(torch.bfloat16) if x.dtype == ml_dtypes.bfloat16 else made


def array(x: Any) -> Any:
    """Convert a tensor to an array of NumPy."""
    x = x.detach()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def escaped(x: Any) -> bool:
    """Return whether a tensor comes from inside a `vmap` that has ended, and cannot be read."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


class Dense(nn.Module):
    def __init__(self, w: Any, point: Callable[[], Any] = nn.Identity):
        super().__init__()
        self.w = nn.Parameter(tensor(w))
        self.point = point()

    def forward(self, x: Any) -> Any:
        return self.point(x @ self.w)


def straight(net: Any, x: Any) -> Any:
    return net.lin(x)


def twice(net: Any, x: Any) -> Any:
    return net.lin(torch.tanh(net.lin(x)))


def broadcast(net: Any, x: Any) -> Any:
    first = net.lin(x)
    return torch.cat([first, net.lin(torch.tanh(x[:1] - first[:1]))])


def shared(net: Any, x: Any) -> Any:
    return torch.tanh(net.lin(x)) + torch.tanh(net.lin(2.0 * x))


def _compiled(net: Any, x: Any) -> Any:
    return torch.compile(net.lin, **COMPILE)(x)


def _vmap(net: Any, x: Any) -> Any:
    return torch.func.vmap(net.lin)(x)


def _remat(net: Any, x: Any) -> Any:
    return checkpoint(net.lin, x, use_reentrant=False)


def _over_time(net: Any, x: Any) -> Any:
    state, out = torch.zeros(WIDTH), []
    for row in x:
        state = torch.tanh(net.lin(state + row))
        out.append(state)
    return torch.stack(out)


def _each(net: Any, x: Any) -> Any:
    return torch.stack([net.lin(row) for row in x])


def _again(net: Any, x: Any) -> Any:
    for _ in range(3):
        x = torch.tanh(net.lin(x))
    return x


def _branch(net: Any, x: Any) -> Any:
    return net.lin(x) if x[0] > -9.0 else x


BODIES: dict[str, Body] = {
    "twice": twice,
    "broadcast": broadcast,
    "shared": shared,
    "jit/lifted": _compiled,
    "vmap/lifted": _vmap,
    "map/lifted": _each,
    "remat/lifted": _remat,
    "scan/lifted": _over_time,
    "fori_loop/lifted": _again,
    "while_loop/lifted": _again,
    "cond/lifted": _branch,
}
_STRAIGHT = ("straight", "train", "cached", "jit/around", "mutated", "exception", "bf16", "unknown")


def missing(case: Case) -> bool:
    """Return whether a case has no equivalent in PyTorch."""
    return case.name not in (*_STRAIGHT, *BODIES, "second", "unedited")


def body(case: Case) -> tuple[Body, Callable[[], None] | None]:
    """Return the body of a model, and a function that repairs one that raises."""
    if case.kind != "exception":
        return BODIES.get(case.name, straight), None
    broken = [True]

    def failing(net: Any, x: Any) -> Any:
        h = net.lin(x)
        if broken:
            raise Broken
        return h

    return failing, broken.clear


class Broken(Exception):
    """The exception that a layer raises."""


def loss_of(out: Any) -> Any:
    return torch.sin(out.float()).sum()


def weights(case: Case) -> Any:
    return WEIGHTS["lin"].astype(case.dtype)


def double(net: Any) -> None:
    """Replace the weights of the layer."""
    with torch.no_grad():
        net.lin.w.mul_(2.0)
