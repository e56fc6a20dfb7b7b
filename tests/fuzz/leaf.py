"""Straight arithmetic and the constants of the language, written once against an array namespace.

`do(xp, node, x, env, sow)` is the meaning of a `Do` node. `xp` is one of two namespaces with the
same few functions: `build.Jnp` on JAX arrays and `tape.Tape` on the reference's variables. There
is no control flow here, so the two sides share nothing that the engine has to get right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from .program import DIM, Do


class Env(NamedTuple):
    """The values that a body closes over.

    `at`, for changes by hand: their inputs, and the numbers of the iterations,
    examples and devices around it.
    """

    outer: Any
    n: Any
    at: tuple[Any, ...] | None = None


class Namespace(Protocol):
    """The operations that `do` needs."""

    def sin(self, x: Any, /) -> Any: ...
    def tanh(self, x: Any, /) -> Any: ...
    def add(self, x: Any, y: Any, /) -> Any: ...
    def mul(self, x: Any, y: Any, /) -> Any: ...
    def dot(self, matrix: np.ndarray, x: Any, /) -> Any: ...
    def where(self, mask: Any, x: Any, y: Any, /) -> Any: ...
    def sum(self, x: Any, /) -> Any: ...
    def half(self, x: Any, /) -> Any: ...
    def full(self, x: Any, like: Any, /) -> Any: ...
    def stop(self, x: Any, /) -> Any: ...
    def named(self, x: Any, /) -> Any: ...


Sow = Callable[[Any, str], Any]

VECTORS = ("sin", "tanh", "scale", "dot", "mix", "mask", "named")
"""Operations whose result has the shape and dtype of x."""


RULES = {"dot": "dot_general", "named": "kept"}
"""By operation, what a rule calls the value that it computes: a primitive, a `checkpoint_name`."""


@cache
def weights(size: int, salt: int = 0) -> np.ndarray:
    """Make `size` different rows within [0.5, 1], so that examples, devices, iterations differ."""
    return np.random.default_rng(1000 * salt + size).uniform(0.5, 1.0, (size, DIM))


@cache
def matrix() -> np.ndarray:
    """Make a rotation scaled by 0.9."""
    q, _ = np.linalg.qr(np.random.default_rng(7).normal(size=(DIM, DIM)))
    return 0.9 * q


def mix(xp: Namespace, x: Any, y: Any) -> Any:
    """Average two values."""
    return xp.add(xp.mul(x, 0.5), xp.mul(y, 0.5))


def value(xp: Namespace, op: str, x: Any, env: Env) -> Any:
    """Compute the operation, before its mark."""
    match op:
        case "sin":
            return xp.sin(x)
        case "tanh":
            return xp.tanh(x)
        case "scale":
            return xp.mul(x, weights(1, salt=1)[0])
        case "dot":
            return xp.dot(matrix(), x)
        case "mix":
            return mix(xp, x, env.outer)
        case "mask":
            return xp.where(env.n % 2 == 0, x, xp.mul(x, -0.5))
        case "named":
            return xp.named(xp.sin(x))
        case "outer":
            return xp.sin(env.outer)
        case "half":
            return xp.sin(xp.half(x))
        case "int":
            return (env.n * 3 + 1) % 5
        case "scalar":
            return xp.sum(xp.mul(x, 0.4))
    raise AssertionError(op)


def absorb(xp: Namespace, op: str, x: Any, v: Any, *, replace: bool) -> Any:
    """Mix `v` into `x`. Vectors of `VECTORS` may `replace` it, since they depend on it."""
    match op:
        case "outer":
            return mix(xp, x, v)
        case "half":
            return mix(xp, x, xp.full(v, x))
        case "int":
            return xp.mul(x, xp.add(xp.mul(xp.full(v, x), 0.125), 0.5))
        case "scalar":
            return xp.add(xp.mul(x, 0.6), xp.mul(xp.tanh(v), 0.4))
    return v if replace else mix(xp, x, v)


def do(
    xp: Namespace, node: Do, x: Any, env: Env, sow: Sow, ruled: Callable[[Any], Any] = lambda v: v
) -> Any:
    """Compute a `Do` node. `ruled` marks the values that a rule of `RULES` would mark."""
    v = value(xp, node.op, x, env)
    v = ruled(v) if node.op in RULES else v
    if node.name is None:
        return absorb(xp, node.op, x, v, replace=True)
    marked = sow(v, node.name)
    if node.use == "stop":
        marked = xp.stop(marked)
    used = v if node.use == "drop" else marked
    return absorb(xp, node.op, x, used, replace=node.use in ("through", "drop"))
