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
import numpy as np

from tapax import _jax
from tapax._jax import AbstractValue, Atom, Equation, Jaxpr, PyTree, Value
from tapax._jaxpr.kinds import CALLS, CUSTOM_RULES, LOOPS, Kind, kind_of
from tapax._marks.scopes import Scopes, scopes_of
from tapax._marks.tap import tap_p

FRAMES = LOOPS | Kind.SHARD_MAP


def bind_plain(eqn: Equation, args: Sequence[Value]) -> list[Value]:
    """Evaluates an equation as it stands: a tap passes its operand on, and nothing is printed."""
    if eqn.primitive is tap_p:
        return tap_p.impl(*args, **eqn.params)
    return [] if kind_of(eqn) & Kind.DEBUG else _jax.bind_equation(eqn, args)


def is_inexact(aval: AbstractValue) -> bool:
    """Whether a value of this type can have an element that is not finite."""
    if _jax.is_reference(aval):
        return False
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and aval.size > 0


_MOVES = Kind.COPY | Kind.REARRANGEMENT | Kind.KEEPS_FINITE


def moved_operands(eqn: Equation) -> Sequence[Atom] | None:
    """The operand that each result of an equation is as finite as; None if that is not known."""
    if kind_of(eqn) & _MOVES and all(map(_is_wide_enough, eqn.invars, eqn.outvars)):
        return eqn.invars[: len(eqn.outvars)]
    scaled = _scaled_operand(eqn)
    return None if scaled is None else [scaled]


def _scaled_operand(eqn: Equation) -> Atom | None:
    """The operand of an equation that scales or shifts it by a literal too small to overflow."""
    name = eqn.primitive.name
    if name not in ("add", "div", "mul", "sub") or not is_inexact(eqn.outvars[0].aval):
        return None
    given = [v for v in eqn.invars if not isinstance(v, _jax.Literal)]
    literals = [abs(v.val) for v in eqn.invars if isinstance(v, _jax.Literal)]
    dtype = eqn.outvars[0].aval.dtype
    is_real = jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits > 8
    if len(given) != 1 or not is_real:
        return None
    size = float(literals[0])
    if name == "div":
        is_small = given[0] is eqn.invars[0] and 1 <= size < float("inf")
    else:
        is_small = size <= 1 and (name != "mul" or size > 0)
    return given[0] if is_small else None


def _is_wide_enough(operand: Any, result: PyTree) -> bool:
    """Whether what is finite in the type of an operand is so in that of the result."""
    old, new = operand.aval.dtype, result.aval.dtype
    if old == new:
        return True
    if not (jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.inexact)):
        return False
    return bool(jnp.finfo(old).max <= jnp.finfo(new).max) and jnp.finfo(old).bits > 8


def called_body(eqn: Equation, args: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """The body of an equation that does no more than run it, and what it is run on."""
    kind = kind_of(eqn)
    if kind & (CALLS | CUSTOM_RULES) or (kind is Kind.REMAT and not _is_recomputed(eqn)):
        return _jax.call_body(eqn), args
    if kind is Kind.LINEAR_SOLVE:
        lengths = eqn.params["const_lengths"]
        start = sum(lengths[: lengths._fields.index("solve")])
        given = [*args[start : start + lengths.solve], *args[sum(lengths) :]]
        return eqn.params["jaxprs"].solve, given
    return None


def _is_recomputed(eqn: Equation) -> bool:
    """Whether a remat computes once more what a backward pass needs."""
    return eqn.params.get("differentiated", False)


def inlined_bodies(eqn: Equation) -> list[Jaxpr]:
    """The bodies of an equation that are counted with what is around it."""
    found = called_body(eqn, eqn.invars)
    if found is not None:
        return [found[0]]
    kind = kind_of(eqn)
    if kind is Kind.COND:
        return list(eqn.params["branches"])
    return [_jax.call_body(eqn)] if kind is Kind.REMAT else []


def frame_body(eqn: Equation) -> Jaxpr | None:
    """The body of an equation that is a frame; None if it is none."""
    kind = kind_of(eqn)
    if not kind & FRAMES:
        return None
    return eqn.params["body_jaxpr" if kind is Kind.WHILE else "jaxpr"]


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

    def offsets(self, jaxpr: Jaxpr) -> list[int]:
        """The number of every equation of a body, counted from its start; constants come first."""
        return self._of(jaxpr)[1]

    def size(self, jaxpr: Jaxpr) -> int:
        """How many numbers a body takes."""
        return self._of(jaxpr)[2]

    def body_starts(self, eqn: Equation, number: int) -> list[int]:
        """Where the numbers of each body start, for an equation of this number."""
        sizes = [self.size(body) for body in inlined_bodies(eqn)]
        return [number + 1 + sum(sizes[:i]) for i in range(len(sizes))]

    def depth(self, jaxpr: Jaxpr) -> int:
        """How many frames are within one another."""
        depths = [0]
        for eqn in _jax.open_jaxpr(jaxpr).eqns:
            body = frame_body(eqn)
            if body is not None:
                depths.append(1 + self.depth(body))
            depths += [self.depth(b) for b in inlined_bodies(eqn)]
        return max(depths)

    def _of(self, jaxpr: Jaxpr) -> tuple[Any, list[int], int]:
        inner = _jax.open_jaxpr(jaxpr)
        if id(inner) not in self._known:
            offsets, at = [], len(inner.constvars)
            for eqn in inner.eqns:
                offsets.append(at)
                at += self._span(eqn)
            # The jaxpr is kept so that its id stays its own.
            self._known[id(inner)] = inner, offsets, at
        return self._known[id(inner)]

    def _span(self, eqn: Equation) -> int:
        if eqn.primitive is tap_p:
            return 0
        if frame_body(eqn) is not None:
            # Each of its results may have an origin of its own; there may be tokens among them.
            return 2 + sum(is_inexact(v.aval) for v in eqn.outvars)
        bodies = inlined_bodies(eqn)
        if not bodies and (
            not any(is_inexact(v.aval) for v in eqn.outvars)
            or moved_operands(eqn) is not None
            or kind_of(eqn) & Kind.PLACEHOLDER
        ):
            return 0
        return 1 + sum(map(self.size, bodies))

    def find_constant(
        self, jaxpr: Jaxpr, number: int, path: Sequence[NumberedEquation]
    ) -> Value | None:
        """The constant of a number within a frame, with the way that `find` gave; None if none."""
        base = 0
        if path:
            eqn, start, body, *_ = path[-1]
            bodies = inlined_bodies(eqn)
            if not bodies or number == start:
                return None
            jaxpr, base = bodies[body], self.body_starts(eqn, start)[body]
        consts = _jax.jaxpr_consts(jaxpr)
        return consts[number - base] if number - base < len(consts) else None

    def find(self, jaxpr: Jaxpr, number: int, scopes: Scopes = ()) -> list[NumberedEquation]:
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
