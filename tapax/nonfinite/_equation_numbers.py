"""Numbers of the equations of a program, in the order of execution.

Every equation of a program has a number. The count continues through bodies that run once where
they are called: jit, remat, branches. The body of a loop or a shard_map is a *frame*, whose numbers
start from zero, since it runs many times. So the numbers of the frames around an equation and its
number in the innermost frame identify the equation; with the iterations of the frames they identify
one run of it. Taps and equations whose results are always finite do not count.

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
    """Evaluate an equation unchanged, except that a tap is the identity and nothing is printed."""
    if eqn.primitive is tap_p:
        return tap_p.impl(*args, **eqn.params)
    return [] if kind_of(eqn) & Kind.DEBUG else _jax.bind_equation(eqn, args)


def is_inexact(aval: AbstractValue) -> bool:
    """Return whether a value of this type can have an element that is not finite."""
    if _jax.is_reference(aval):
        return False
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and aval.size > 0


def has_origin(aval: AbstractValue) -> bool:
    """Return whether a bad value can decide a value of this type: any array with elements."""
    has_elements = getattr(aval, "dtype", None) is not None and aval.size > 0
    return has_elements and not _jax.is_reference(aval)


_MOVES = Kind.COPY | Kind.REARRANGEMENT | Kind.KEEPS_FINITE


def moved_operands(eqn: Equation) -> Sequence[Atom] | None:
    """Return, for each result, the operand that decides whether it is finite; None if unknown."""
    if kind_of(eqn) & _MOVES and all(map(_is_wide_enough, eqn.invars, eqn.outvars)):
        return eqn.invars[: len(eqn.outvars)]
    scaled = _scaled_operand(eqn)
    return None if scaled is None else [scaled]


def _scaled_operand(eqn: Equation) -> Atom | None:
    """Return the operand that an equation scales or shifts by a literal too small to overflow."""
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
    """Return whether every finite number of the operand's dtype is finite in the result's."""
    old, new = operand.aval.dtype, result.aval.dtype
    if old == new:
        return True
    if not (jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.inexact)):
        return False
    return bool(jnp.finfo(old).max <= jnp.finfo(new).max) and jnp.finfo(old).bits > 8


def called_body(eqn: Equation, args: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """Return the body and its operands, if the equation only runs a body; otherwise None."""
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
    """Return whether a remat recomputes values for a backward pass."""
    return eqn.params.get("differentiated", False)


def inlined_bodies(eqn: Equation) -> list[Jaxpr]:
    """Return the bodies of an equation whose numbers continue those around the equation."""
    found = called_body(eqn, eqn.invars)
    if found is not None:
        return [found[0]]
    kind = kind_of(eqn)
    if kind is Kind.COND:
        return list(eqn.params["branches"])
    return [_jax.call_body(eqn)] if kind is Kind.REMAT else []


def frame_body(eqn: Equation) -> Jaxpr | None:
    """Return the body of an equation if the body is a frame; otherwise None."""
    kind = kind_of(eqn)
    if not kind & FRAMES:
        return None
    return eqn.params["body_jaxpr" if kind is Kind.WHILE else "jaxpr"]


class NumberedEquation(NamedTuple):
    """An equation, its number, its scopes, and the index of the body in which a path continues."""

    eqn: Any
    number: int
    body: int
    scopes: Scopes
    jaxpr: Any
    """The body that contains the equation."""


class EquationNumbers:
    """The numbers of the equations of a program."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[int], int]] = {}

    def offsets(self, jaxpr: Jaxpr) -> list[int]:
        """Return the number of each equation of a body, counted from its start, after constants."""
        return self._of(jaxpr)[1]

    def size(self, jaxpr: Jaxpr) -> int:
        """Count the numbers that a body takes, constants included."""
        return self._of(jaxpr)[2]

    def body_starts(self, eqn: Equation, number: int) -> list[int]:
        """Return the first number of each body of an equation whose number is `number`."""
        sizes = [self.size(body) for body in inlined_bodies(eqn)]
        return [number + 1 + sum(sizes[:i]) for i in range(len(sizes))]

    def depth(self, jaxpr: Jaxpr) -> int:
        """Return the largest number of frames around an equation of `jaxpr`."""
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
            # Keep the jaxpr, so that no other jaxpr gets its id.
            self._known[id(inner)] = inner, offsets, at
        return self._known[id(inner)]

    def _span(self, eqn: Equation) -> int:
        if eqn.primitive is tap_p:
            return 0
        if frame_body(eqn) is not None:
            return 2 + sum(has_origin(v.aval) for v in eqn.outvars)
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
        """Return the constant of a number in a frame, or None; `path` is the result of `find`."""
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
        """Find the path to the equation of a number in a frame; empty for a constant."""
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
