"""Numbers of the equations of a program, which grow in the order of execution.

Every equation of a program has a number, counted through the bodies that run once where they are
called: jit, remat, branches. The body of a loop, and of a shard_map, is a *frame*: it is counted
from zero again, since it runs many times. So an equation is known by the numbers of the frames
around it and its own, and one run of it by these and the iterations between them. Taps are not
counted, nor are equations whose results are always finite.

>>> import jax, jax.numpy as jnp
>>> program = jax.make_jaxpr(lambda x: jnp.sin(jax.jit(jnp.cos)(x)))(1.0)
>>> equations = EquationNumbers()
>>> [equations.find(program, n)[-1].eqn.primitive.name for n in range(equations.size(program))]
['jit', 'cos', 'sin']
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from tapax import _jax
from tapax._marks.scopes import Scopes, scopes_of
from tapax._marks.tap import tap_p

FRAMES = ("scan", "while", "shard_map")
_CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "call", "eval_jaxpr", "core_closed_call"),
        *("custom_jvp_call", "CustomJVPTraced", "RematTraced"),
        *("custom_vjp_call", "custom_vjp_call_jaxpr", "CustomVJPTraced"),
    }
)
_SOLVES = ("custom_linear_solve", "linear_solve")
REMATS = ("remat2", "remat", "checkpoint")


def is_inexact(aval: Any) -> bool:
    """Whether a value of this type can have an element that is not finite."""
    if _jax.is_reference(aval):
        return False
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and aval.size > 0


_MOVES = frozenset(
    {
        *("neg", "abs", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims"),
        *("rev", "copy", "copy_p", "conj", "convert_element_type", "sharding_constraint", "name"),
        *("reshard", "mesh_cast", "device_put", "pvary", "pcast", "optimization_barrier"),
        *("stop_gradient", "layout_constraint"),
    }
)
"""Primitives that return their operand with other signs, places or types."""
PLACEHOLDERS = frozenset({"empty", "empty2"})
"""Primitives that fill in for a value that a branch does not have."""


def is_move(eqn: Any) -> bool:
    """Whether an equation returns its operands, each as finite as it was."""
    return eqn.primitive.name in _MOVES and all(map(_is_wide_enough, eqn.invars, eqn.outvars))


def _is_wide_enough(operand: Any, result: Any) -> bool:
    """Whether what is finite in the type of an operand is so in that of the result."""
    old, new = operand.aval.dtype, result.aval.dtype
    if old == new:
        return True
    if not (jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.inexact)):
        return False
    return bool(jnp.finfo(old).max <= jnp.finfo(new).max) and jnp.finfo(old).bits > 8


def called_body(eqn: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """The body of an equation that does no more than run it, and what it is run on."""
    kind = _jax.kind_of(eqn)
    if kind in _CALLS:
        body = eqn.params.get("jaxpr")
        return (_jax.call_body(eqn) if body is None else body), args
    if kind in REMATS and not eqn.params["differentiated"]:
        return eqn.params["jaxpr"], args
    if kind in _SOLVES:
        lengths = eqn.params["const_lengths"]
        start = sum(lengths[: lengths._fields.index("solve")])
        given = [*args[start : start + lengths.solve], *args[sum(lengths) :]]
        return eqn.params["jaxprs"].solve, given
    return None


def inlined_bodies(eqn: Any) -> list[Any]:
    """The bodies of an equation that are counted with what is around it."""
    found = called_body(eqn, eqn.invars)
    if found is not None:
        return [found[0]]
    if eqn.primitive.name == "cond":
        return list(eqn.params["branches"])
    if _jax.kind_of(eqn) in REMATS:
        return [eqn.params["jaxpr"]]
    return []


def frame_body(eqn: Any) -> Any:
    """The body of an equation that is a frame; None if it is none."""
    if eqn.primitive.name not in FRAMES:
        return None
    return eqn.params["body_jaxpr" if eqn.primitive.name == "while" else "jaxpr"]


class NumberedEquation(NamedTuple):
    """An equation, its number, its scopes, and which of its bodies a path goes on in."""

    eqn: Any
    number: int
    body: int
    scopes: Scopes
    jaxpr: Any
    """The body that the equation is in."""


class EquationNumbers:
    """The numbers of the equations of a program."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[int], int]] = {}

    def offsets(self, jaxpr: Any) -> list[int]:
        """The number of every equation of a body, counted from its start; constants come first."""
        return self._of(jaxpr)[1]

    def size(self, jaxpr: Any) -> int:
        """How many numbers a body takes."""
        return self._of(jaxpr)[2]

    def body_starts(self, eqn: Any, number: int) -> list[int]:
        """Where the numbers of each body start, for an equation of this number."""
        sizes = [self.size(body) for body in inlined_bodies(eqn)]
        return [number + 1 + sum(sizes[:i]) for i in range(len(sizes))]

    def depth(self, jaxpr: Any) -> int:
        """How many frames are within one another."""
        depths = [0]
        for eqn in _jax.open_jaxpr(jaxpr).eqns:
            body = frame_body(eqn)
            if body is not None:
                depths.append(1 + self.depth(body))
            depths += [self.depth(b) for b in inlined_bodies(eqn)]
        return max(depths)

    def _of(self, jaxpr: Any) -> tuple[Any, list[int], int]:
        inner = _jax.open_jaxpr(jaxpr)
        if id(inner) not in self._known:
            offsets, at = [], len(inner.constvars)
            for eqn in inner.eqns:
                offsets.append(at)
                at += self._span(eqn)
            # The jaxpr is kept so that its id stays its own.
            self._known[id(inner)] = inner, offsets, at
        return self._known[id(inner)]

    def _span(self, eqn: Any) -> int:
        if eqn.primitive is tap_p:
            return 0
        if frame_body(eqn) is not None:
            # Each of its results may have an origin of its own; there may be tokens among them.
            return 2 + sum(is_inexact(v.aval) for v in eqn.outvars)
        bodies = inlined_bodies(eqn)
        if not bodies and (
            not any(is_inexact(v.aval) for v in eqn.outvars)
            or is_move(eqn)
            or eqn.primitive.name in PLACEHOLDERS
        ):
            return 0
        return 1 + sum(map(self.size, bodies))

    def find(self, jaxpr: Any, number: int, scopes: Scopes = ()) -> list[NumberedEquation]:
        """The way to the equation of a number within a frame; empty for a constant."""
        equations: list[NumberedEquation] = []
        base = 0
        while True:
            inner = _jax.open_jaxpr(jaxpr)
            offsets = self.offsets(jaxpr)
            ends = [*offsets[1:], self.size(jaxpr)]
            found = (i for i, end in enumerate(ends) if base + offsets[i] <= number < base + end)
            at = next(found, None)
            if at is None:
                return equations
            eqn, offset = inner.eqns[at], offsets[at]
            scopes = scopes_of(eqn, scopes)
            base += offset
            bodies = inlined_bodies(eqn)
            if not bodies or number == base:
                return [*equations, NumberedEquation(eqn, base, 0, scopes, jaxpr)]
            starts = self.body_starts(eqn, base)
            body = max(i for i, start in enumerate(starts) if start <= number)
            equations.append(NumberedEquation(eqn, base, body, scopes, jaxpr))
            jaxpr, base = bodies[body], starts[body]
