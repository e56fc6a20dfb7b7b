"""Reverse-mode differentiation in numpy, float64, for the reference.

A `Var` remembers its parents and, for each, the function that maps a cotangent of the result to a
cotangent of the parent. Those functions compute on `Var`s themselves, so a gradient can be
differentiated again. It does not use JAX, so a mistake in JAX's rules, or in the engine's use of
them, cannot occur here too.

    >>> x = leaf(np.array([0.5, 1.0, 2.0]))
    >>> y = Tape.sum(Tape.sin(x))
    >>> np.allclose(backward(y, x)[x.order].value, np.cos(x.value))
    True

`coarse` marks values that went through bfloat16 and compare only to a few digits. `active` holds
the gradients (by token) whose variable this value depends on, as JAX sees it: by structure, not
by value.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

_order = count()

Pull = Callable[["Var"], "Var"]


@dataclass(eq=False)
class Var:
    """A value on the tape."""

    value: np.ndarray
    parents: tuple[tuple[Var, Pull], ...] = ()
    coarse: bool = False
    active: frozenset[int] = frozenset()
    order: int = field(default_factory=lambda: next(_order))


def leaf(value: np.ndarray) -> Var:
    """Make a variable with no history."""
    return Var(np.asarray(value, np.float64))


def _node(value: np.ndarray, *parents: tuple[Var, Pull]) -> Var:
    coarse = any(p.coarse for p, _ in parents)
    active = frozenset[int]().union(*(p.active for p, _ in parents))
    return Var(np.asarray(value), parents, coarse, active)


def identity(x: Var, token: int | None = None) -> Var:
    """Copy a variable with a separate cotangent, active for the gradient `token` if given."""
    out = _node(x.value, (x, lambda ct: ct))
    if token is not None:
        out.active |= {token}
    return out


def custom(x: Var, y: Var, pull: Pull) -> Var:
    """Return the value of `y`, with `pull` for its derivative with respect to `x`."""
    out = _node(y.value, (x, pull))
    out.coarse |= y.coarse
    return out


def _fit(shape: tuple[int, ...], ct: Var) -> Var:
    """Sum a cotangent to the shape of its operand; the language broadcasts only scalars."""
    return ct if ct.value.shape == shape else Tape.sum(ct)


def _raw(x: Any) -> Any:
    return x.value if isinstance(x, Var) else x


class Tape:
    """The namespace of `leaf.do` on variables.

    Constants may be floats or arrays. Integers are plain arrays.
    """

    @staticmethod
    def sin(x: Var) -> Var:
        return _node(np.sin(x.value), (x, lambda ct: Tape.mul(ct, Tape.cos(x))))

    @staticmethod
    def cos(x: Var) -> Var:
        return _node(np.cos(x.value), (x, lambda ct: Tape.mul(ct, Tape.mul(Tape.sin(x), -1.0))))

    @staticmethod
    def tanh(x: Var) -> Var:
        # 1 - tanh^2, recomputed so that the rule can be differentiated in turn.
        return _node(
            np.tanh(x.value),
            (
                x,
                lambda ct: Tape.mul(
                    ct, Tape.add(1.0, Tape.mul(-1.0, Tape.mul(Tape.tanh(x), Tape.tanh(x))))
                ),
            ),
        )

    @staticmethod
    def add(x: Any, y: Any) -> Any:
        parents = [
            (p, lambda ct, s=p.value.shape: _fit(s, ct)) for p in (x, y) if isinstance(p, Var)
        ]
        value = _raw(x) + _raw(y)
        return _node(value, *parents) if parents else value

    @staticmethod
    def mul(x: Any, y: Any) -> Any:
        parents = [
            (p, lambda ct, s=p.value.shape, q=q: _fit(s, Tape.mul(ct, q)))
            for p, q in ((x, y), (y, x))
            if isinstance(p, Var)
        ]
        value = _raw(x) * _raw(y)
        return _node(value, *parents) if parents else value

    @staticmethod
    def dot(matrix: np.ndarray, x: Var) -> Var:
        return _node(matrix @ x.value, (x, lambda ct: Tape.dot(matrix.T, ct)))

    @staticmethod
    def where(mask: np.ndarray, x: Var, y: Var) -> Var:
        return Tape.add(Tape.mul(x, mask.astype(float)), Tape.mul(y, (~mask).astype(float)))

    @staticmethod
    def sum(x: Var) -> Var:
        return _node(x.value.sum(), (x, lambda ct: Tape.mul(ct, np.ones(x.value.shape))))

    @staticmethod
    def half(x: Var) -> Var:
        """Mark as bfloat16 without rounding, which the tolerance of coarse values exceeds."""
        out = _node(x.value, (x, Tape.half))
        out.coarse = True
        return out

    @staticmethod
    def full(x: Any, like: Any) -> Any:
        del like
        return x

    @staticmethod
    def stop(x: Any) -> Any:
        return Var(x.value, (), x.coarse) if isinstance(x, Var) else x

    @staticmethod
    def named(x: Var) -> Var:
        return x


def backward(out: Var, start: Var, seed: Var | None = None) -> dict[int, Var]:
    """Return the cotangents of everything between `start` and `out`, by `Var.order`.

    Nothing older than `start` is visited: the body of a gradient makes new variables, and only
    those belong to it.
    """
    cotangents = {out.order: leaf(np.ones(out.value.shape)) if seed is None else seed}
    found = {out.order: out}
    pending = [-out.order]
    while pending:
        node = found[-heapq.heappop(pending)]
        for parent, pull in node.parents:
            if parent.order < start.order:
                continue
            ct = pull(cotangents[node.order])
            if parent.order in cotangents:
                cotangents[parent.order] = Tape.add(cotangents[parent.order], ct)
            else:
                cotangents[parent.order] = ct
                found[parent.order] = parent
                heapq.heappush(pending, -parent.order)
    return cotangents
