"""Origins: a walk that carries, with every value, the place where its first bad element was made.

A value is *bad* if one of its elements is not finite. Each value has an origin, a scalar int32 that
grows with time. The origin of a finite value is `NONE`; the origin of a bad value is the earliest
origin of its bad operands, or the equation itself if all operands are finite. So a bad value that
the program later masks or swallows leaves no trace. The classes of origins:

================  ===============================================================================
class             origin
================  ===============================================================================
`UNSURE`          a constant, or an equation that made a NaN from it; the search must be repeated
`MADE`            an equation that made the bad value from finite operands
`GIVEN`           an argument of the program
`INDIRECT_MADE`   like `MADE`, but a bool or an integer lies between that bad value and this one
`INDIRECT_GIVEN`  like `GIVEN`, but a bool or an integer lies between
`NAN`             a constant of the program that is NaN
`REMOTE`          a collective that brought the value from another device, which knows more
`INF`             a constant of the program that is infinite: intended, and a fault only if a result
                  shows it. The origin of a NaN made from it, `inf - inf`, is the equation.
================  ===============================================================================

No element shows whether a bool or an integer is bad, so its origin is that of its operands, in an
indirect class. A bad constant that `where(isnan(y), nan, y)` picks, or a NaN that comes back from
its bits, thus has the origin of the earlier bad value. But that value may be masked and decide
nothing about a bad element, so a bad value with an origin of a direct class comes first. An
indirect origin ends at a finite value: `log(-argmax(y))` makes a NaN of its own.

Within a class, the inputs of a frame (see `_equation_numbers`) come first, in the order of their
time; then the equations of the frame by their numbers. An origin that leaves a frame becomes a
*row*: `[origin outside, iteration, origin in the frame, iteration, ..., device]`. The lexicographic
order of rows is the order of time. Outside the frame each of its results has a number as its
origin, and a table keeps the row for that number.

While a body is evaluated, the walk computes only the badness of each value; the dependencies
between values are static. At the end of the body a loop over all values solves the origins: as
scalars throughout the program, they would take the compiler hours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core.primitives import select_n_p

import tapax.nonfinite._frames as frames
from tapax import _jax
from tapax._jax import Atom, Equation, Jaxpr, Value, Var
from tapax._jaxpr.evaluate import evaluate_equations, read
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._marks.tap import tap_p
from tapax.nonfinite._badness import FINE, NOT_A_NUMBER, BadElements, bad_elements
from tapax.nonfinite._equation_numbers import (
    EquationNumbers,
    bind_plain,
    called_body,
    has_origin,
    is_inexact,
    moved_operands,
)
from tapax.nonfinite._frames import NONE, Origin, OriginFrame, Origins, SearchOptions, origin_at


class OriginWalk:
    """One evaluation of a program with origins, with the `handlers` of `_control_flow`."""

    def __init__(self, jaxpr: Jaxpr, options: SearchOptions, handlers: Mapping[Kind, Handler]):
        self.jaxpr, self.options, self._handlers = jaxpr, options, handlers
        self.equations = EquationNumbers()

    def run(self, args: Sequence[Any]) -> Any:
        """Evaluate the program; return the row of the first bad value that reaches a result."""
        frame = OriginFrame(2 + 2 * self.equations.depth(self.jaxpr), self.options)
        origins = [
            frame.add_value([], x, frames.input_origin(frames.GIVEN, i))
            if is_inexact(jax.typeof(x))
            else None
            for i, x in enumerate(args)
        ]
        _, found = self.run_body(self.jaxpr, args, origins, 0, frame)
        first = frame.add([*found, self.first_bad(frame)], None, NONE)
        return frame.rows(frame.pack([first]))[0]

    def first_bad(self, frame: OriginFrame) -> Origin:
        """Return the origin of the first bad value made in `frame` if `masked`; otherwise None."""
        return frame.add_known(frame.earliest_made())[0] if self.options.masked else None

    def run_body(
        self, jaxpr: Jaxpr, args: Sequence[Any], origins: Origins, base: int, frame: OriginFrame
    ) -> ValuesAndOrigins:
        """Evaluate a body whose equation numbers start at `base`."""
        inner = _jax.open_jaxpr(jaxpr)
        constants = _jax.jaxpr_consts(jaxpr)
        consts = [_const_origin(c, base + i, frame) for i, c in enumerate(constants)]
        given = zip((*constants, *args), (*consts, *origins), strict=True)
        env: dict[Var, _Traced] = dict(
            zip((*inner.constvars, *inner.invars), itertools.starmap(_Traced, given), strict=True)
        )
        offsets = self.equations.offsets(jaxpr)

        def origin(atom: Atom, traced: _Traced, number: int) -> Origin:
            if isinstance(atom, _jax.Literal):
                return _literal_origin(atom, number, frame)
            return traced.origin

        def apply(position: int, eqn: Equation, operands: list[_Traced]) -> list[_Traced]:
            number = base + offsets[position]
            held = [v for v in eqn.outvars if _jax.is_reference(v.aval)]
            # A literal that is not finite decides nothing by a comparison with it.
            keeps = bool(held) or any(is_inexact(v.aval) for v in eqn.outvars)
            before = [
                origin(v, x, number) if keeps else x.origin
                for v, x in zip(eqn.invars, operands, strict=True)
            ]
            step = EquationCall(eqn, [x.value for x in operands], before, number, frame)
            outs, found = _jax.in_context(eqn, self._equation, step)
            # A value read from a reference has the origin of the values written to it.
            written = eqn.invars[:1] if kind_of(eqn) & Kind.WRITE else []
            if held or written:
                joined = frame.add(before, None, NONE)
                env.update((v, _Traced(env[v].value, joined)) for v in written)
                found = [
                    joined if v in held else o for v, o in zip(eqn.outvars, found, strict=True)
                ]
            return list(map(_Traced, outs, found))

        evaluate_equations(inner.eqns, env, apply, _read_literal)
        last = base + self.equations.size(jaxpr) - 1
        results = [read(env, v, _read_literal) for v in inner.outvars]
        left = [origin(v, x, last) for v, x in zip(inner.outvars, results, strict=True)]
        return [x.value for x in results], left

    def _equation(self, step: EquationCall) -> ValuesAndOrigins:
        call = called_body(step.eqn, list(zip(step.args, step.origins, strict=True)))
        if call is not None:
            body, given = call
            values, before = [x for x, _ in given], [o for _, o in given]
            return self.run_body(body, values, before, step.number + 1, step.frame)
        handler = self._handlers.get(kind_of(step.eqn))
        if handler is not None:
            return handler(self, step)
        outs = bind_plain(step.eqn, step.args)
        return outs, _judge(step, outs)


class _Traced(NamedTuple):
    """A value and its origin."""

    value: Value
    origin: Origin


def _read_literal(literal: Atom) -> _Traced:
    """Return a literal without an origin, which depends on the equation that reads it."""
    return _Traced(_jax.literal_value(literal), None)


class EquationCall(NamedTuple):
    """An equation to evaluate, with its operands, their origins, its number and its frame."""

    eqn: Any
    args: list[Any]
    origins: Origins
    number: int
    frame: OriginFrame


ValuesAndOrigins = tuple[list[Any], Origins]
Handler = Callable[[OriginWalk, EquationCall], ValuesAndOrigins]
"""A function that evaluates one equation with origins."""


def _judge(step: EquationCall, outs: list[Any]) -> Origins:
    """Return the origins of the results of an equation without a body."""
    eqn, _, origins, number, frame = step
    kind = kind_of(eqn)
    if all(o is None for o in origins) and not any(is_inexact(v.aval) for v in eqn.outvars):
        return [None] * len(outs)
    if eqn.primitive is tap_p:
        return [origins[0], *(None for _ in outs[1:])]
    moved = moved_operands(eqn)
    if moved is not None:
        known = dict(zip(map(id, eqn.invars), origins, strict=True))
        pairs = zip(moved, eqn.outvars, strict=True)
        return [known[id(x)] if has_origin(v.aval) else None for x, v in pairs]
    if kind & Kind.PLACEHOLDER:
        return [None] * len(outs)
    if not any(is_inexact(v.aval) for v in eqn.outvars):
        decider = frame.add_discrete(origins)
        return [decider if has_origin(v.aval) else None for v in eqn.outvars]
    if eqn.primitive is select_n_p:
        return [_judge_selection(step)]
    pairs = zip(eqn.invars, origins, strict=True)
    all_finite = all(o is None for v, o in pairs if is_inexact(v.aval))
    if kind & Kind.BOUNDED and all_finite:
        return [None] * len(outs)
    if kind & Kind.PAIRED and len(outs) <= len(origins):
        sources = [[o] for o in origins[: len(outs)]]
    else:
        sources = [origins] * len(outs)
    away = _remote_origin(step)
    here = origin_at(frames.MADE, number)
    found: Origins = []
    for x, before in zip(outs, sources, strict=True):
        aval = jax.typeof(x)
        if is_inexact(aval):
            found.append(frame.add_value([*before, away], x, here))
        else:
            found.append(frame.add_discrete(origins) if has_origin(aval) else None)
    if kind & Kind.SWALLOWS_INFINITY:
        for origin in found:
            frame.forget_constants(origin)
    return found


def _judge_selection(step: EquationCall) -> Origin:
    """Return the earliest origin of the cases of which the selection picks a bad element.

    A bad constant is picked because of an earlier bad value if that value decides the predicate.
    """
    (which, *cases), (decider, *origins), frame = step.args, step.origins, step.frame
    found = []
    for i, (case, origin) in enumerate(zip(cases, origins, strict=True)):
        if origin is None:
            continue
        chosen = which == i if which.dtype != bool else which == bool(i)
        bad = BadElements(bad_elements(case, tell_nan=False).finite | ~chosen)
        found.append(frame.add([origin, decider], bad, NONE))
    return frame.add(found, None, NONE) if found else None


def _remote_origin(step: EquationCall) -> Origin:
    """Return the origin of a value that a collective brings, if an operand is bad on any device."""
    frame, axes = step.frame, _axes_of(step.eqn, step.frame)
    if not axes:
        return None
    values = [bad_elements(x, tell_nan=True) for x in step.args if is_inexact(jax.typeof(x))]
    far = lax.pmax(frame.worst_of_each(values).astype(np.int32), axes)
    bad = BadElements(far == FINE, far != NOT_A_NUMBER)
    return frame.add([], bad, origin_at(frames.REMOTE, step.number))


def _axes_of(eqn: Equation, frame: OriginFrame) -> tuple[str, ...]:
    """Return the axes of the mesh over which an equation brings values from other devices."""
    if not (kind_of(eqn) & Kind.COLLECTIVE and frame.axes):
        return ()
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = (names,) if isinstance(names, str) else names
    return tuple(n for n in names if n in frame.axes)


def _is_bad(literal: Any) -> bool:
    return is_inexact(literal.aval) and not np.isfinite(literal.val)


def _literal_origin(literal: Any, number: int, frame: OriginFrame) -> Origin:
    if not _is_bad(literal):
        return None
    kind = frames.NAN if np.isnan(literal.val) else frames.INF
    return frame.add([], None, origin_at(kind, number))


def _const_origin(x: Value, number: int, frame: OriginFrame) -> Origin:
    if not is_inexact(jax.typeof(x)):
        return None
    elements = bad_elements(x, tell_nan=True)
    assert elements.number is not None
    nan = frame.add([], BadElements(elements.number), origin_at(frames.NAN, number))
    return frame.add([nan], elements, origin_at(frames.INF, number))
