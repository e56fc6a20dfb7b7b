"""Origins: an interpreter that carries with every value where the first bad element came from.

A value is *bad* if an element of it is not finite. Each value has an origin, a scalar int32 that
grows with time: that of a finite value is `NONE`; that of a bad one is the earliest origin of its
bad operands, or, if they are all finite, the equation itself. So a bad value that is masked or
swallowed later leaves no trace. The numbers:

==============  =================================================================================
class           what
==============  =================================================================================
`MADE`          an equation gave it, from finite operands
`GIVEN`         it was in an argument of the program
`NAN`           a constant of the program that is NaN
`REMOTE`        it came by a collective from another device, which knows more
`INF`           a constant of the program that is infinite: meant so, and no fault unless a result
                shows it. The NaN that is made of one, `inf - inf`, has its origin where it is made.
==============  =================================================================================

Within a class, what a frame (see `_layout`) was handed comes first, in the order of its
time; then the equations of the frame by their numbers. Leaving a frame, an origin becomes a *row*:
`[origin around, iteration, origin in the frame, iteration, ..., device]`, whose lexicographic order
is that of time. Outside, the result of a frame has a number of its own again, and the row is kept
in a table.

While a body is evaluated, all that is computed of a value is how bad it is; what depends on what is
static. The origins are solved from these at the end of the body, in a loop over them: woven
into the program as scalars they would take the compiler hours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax import _jax
from tapax._jaxpr.bodies import bodies
from tapax._marks.tap import tap_p
from tapax.nonfinite._frames import (
    GIVEN,
    INF,
    MADE,
    NAN,
    NONE,
    NOT_A_NUMBER,
    REMOTE,
    Frame,
    Origin,
    badness,
    handed,
    made,
)
from tapax.nonfinite._layout import FILLS, SHOWS, Layout, called, checked, moves


class Search:
    """One evaluation of a program with origins.

    `masked` if what never reaches a result counts too. If the program has constants that are not
    finite, a NaN is told from an infinity.
    """

    def __init__(self, jaxpr: Any, masked: bool):
        self.jaxpr = jaxpr
        self.masked = masked
        self.layout = Layout()
        self.deliberate = _has_bad_constants(jaxpr)

    def run(self, args: Sequence[Any]) -> Any:
        """The row of the first bad value that reaches a result."""
        frame = Frame(2 + 2 * self.layout.depth(self.jaxpr), self.deliberate)
        origins = [
            frame.add([], badness(x), handed(GIVEN, i)) if checked(jax.typeof(x)) else None
            for i, x in enumerate(args)
        ]
        _, found = self.body(self.jaxpr, args, origins, 0, frame)
        first = frame.add([*found, self.first(frame)], None, NONE)
        return frame.rows(frame.packed([first]))[0]

    def first(self, frame: Frame) -> Origin:
        """The first bad value that was made in a frame, if that is asked for."""
        return frame.known(frame.lowest())[0] if self.masked else None

    def body(
        self, jaxpr: Any, args: Sequence[Any], origins: Sequence[Origin], base: int, frame: Frame
    ) -> tuple[list[Any], list[Origin]]:
        """Evaluates a body whose equations are numbered from `base`."""
        inner = _jax.open_jaxpr(jaxpr)
        env = dict(_jax.jaxpr_inputs(jaxpr, args))
        consts = [_constant(c, base + i, frame) for i, c in enumerate(_jax.jaxpr_consts(jaxpr))]
        known: dict[Any, Origin] = dict(
            zip((*inner.constvars, *inner.invars), (*consts, *origins), strict=True)
        )

        def value(atom: Any) -> Any:
            if isinstance(atom, _jax.Literal):
                return _jax.literal_value(atom)
            return env[atom]

        def origin(atom: Any, number: int) -> Origin:
            if isinstance(atom, _jax.Literal):
                return _literal(atom, number, frame)
            return known[atom]

        for eqn, offset in zip(inner.eqns, self.layout.offsets(jaxpr), strict=True):
            number = base + offset
            values = [value(v) for v in eqn.invars]
            # Most literals that are no matter are the bounds of comparisons.
            held = [v for v in eqn.outvars if _jax.is_reference(v.aval)]
            matters = held or any(checked(v.aval) for v in eqn.outvars)
            before = [origin(v, number) if matters else None for v in eqn.invars]
            found = _jax.in_context(eqn, self._equation, eqn, values, before, number, frame)
            env.update(zip(eqn.outvars, found[0], strict=True))
            known.update(zip(eqn.outvars, found[1], strict=True))
            # What is read of a reference has the origin of what was written to it.
            held += eqn.invars[:1] if eqn.primitive.name in _WRITES else []
            known.update(dict.fromkeys(held, frame.add(before, None, NONE) if held else None))
        last = base + self.layout.size(jaxpr)
        return [value(v) for v in inner.outvars], [origin(v, last - 1) for v in inner.outvars]

    def _equation(
        self, eqn: Any, args: list[Any], origins: list[Origin], number: int, frame: Frame
    ) -> tuple[list[Any], list[Origin]]:
        if eqn.primitive is tap_p:
            outs = tap_p.impl(*args, **eqn.params)
            return outs, [origins[0], *(None for _ in outs[1:])]
        if eqn.primitive.name in SHOWS:
            return [], []
        call = called(eqn, list(zip(args, origins, strict=True)))
        if call is not None:
            body, given = call
            values, before = [x for x, _ in given], [o for _, o in given]
            return self.body(body, values, before, number + 1, frame)
        handler = HANDLERS.get(_jax.kind_of(eqn))
        if handler is not None:
            return handler(self, eqn, args, origins, number, frame)
        outs = _jax.bind_equation(eqn, args)
        return outs, self._judged(eqn, args, outs, origins, number, frame)

    def _judged(
        self,
        eqn: Any,
        args: list[Any],
        outs: list[Any],
        origins: list[Origin],
        number: int,
        frame: Frame,
    ) -> list[Origin]:
        """The origins of the results of an equation without a body."""
        name = eqn.primitive.name
        if not any(checked(v.aval) for v in eqn.outvars):
            return [None] * len(outs)
        if moves(eqn):
            return [
                o if checked(v.aval) else None for o, v in zip(origins, eqn.outvars, strict=False)
            ]
        if name == "select_n":
            return [self._selected(args, origins, frame)]
        if name in FILLS or (name in _CLOSED and not any(o is not None for o in origins)):
            return [None] * len(outs)
        if name in _EACH and len(outs) <= len(origins):
            sources = [[o] for o in origins[: len(outs)]]
        else:
            sources = [origins] * len(outs)
        away = [self._from_others(eqn, args, number, frame)]
        found: list[Origin] = []
        for x, before in zip(outs, sources, strict=True):
            if not checked(jax.typeof(x)):
                found.append(None)
                continue
            found.append(frame.add([*before, *away], badness(x), made(MADE, number)))
        return found

    def _selected(self, args: list[Any], origins: list[Origin], frame: Frame) -> Origin:
        """Of the cases of a selection, those count of which something bad was selected."""
        which, *cases = args
        found = []
        for i, (case, origin) in enumerate(zip(cases, origins[1:], strict=True)):
            if origin is None:
                continue
            chosen = which == i if which.dtype != bool else which == bool(i)
            bad = jnp.any(~jnp.isfinite(case) & chosen)
            found.append(frame.add([origin], bad, NONE))
        return frame.add(found, None, NONE) if found else None

    def _from_others(self, eqn: Any, args: list[Any], number: int, frame: Frame) -> Origin:
        """The origin of what a collective brings, if an operand is bad on any device."""
        axes = _axes_of(eqn, frame)
        if not axes:
            return None
        own = [frame.same(badness(x)) for x in args if checked(jax.typeof(x))]
        far = [lax.pmax(bad, axes) for bad in own]
        return frame.add([], functools.reduce(jnp.maximum, far), made(REMOTE, number))


Handler = Callable[
    [Search, Any, list[Any], list[Origin], int, Frame], tuple[list[Any], list[Origin]]
]
HANDLERS: dict[str, Handler] = {}

_EACH = frozenset({"sort", "psum", "psum_invariant", "psum2", "pmax", "pmin", "all_gather"})
"""What has a result for each of its operands, or of the first few."""
_CLOSED = frozenset(
    {
        *("sign", "tanh", "logistic", "erf", "sin", "cos", "max", "min", "clamp", "floor", "ceil"),
        *("round", "concatenate", "pad", "slice", "dynamic_slice", "dynamic_update_slice"),
        *("reduce_max", "reduce_min", "convert_element_type", "iota"),
    }
)
"""What gives finite results for finite operands."""
_WRITES = frozenset({"swap", "addupdate"})
_COLLECTIVE = frozenset(
    {
        *("psum", "psum_invariant", "psum2", "pmax", "pmin", "all_gather", "all_to_all"),
        *("ppermute", "reduce_scatter", "psum_scatter", "all_gather_invariant", "pgather"),
        *("all_gather_reduced", "unreduced_psum", "collective_permute", "ragged_all_to_all"),
    }
)


def _axes_of(eqn: Any, frame: Frame) -> tuple[str, ...]:
    """The axes of the mesh over which an equation brings values from other devices."""
    if eqn.primitive.name not in _COLLECTIVE or not frame.axes:
        return ()
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = (names,) if isinstance(names, str) else names
    return tuple(n for n in names if n in frame.axes)


def _is_bad(literal: Any) -> bool:
    return checked(literal.aval) and not np.isfinite(literal.val)


def _literal(literal: Any, number: int, frame: Frame) -> Origin:
    if not _is_bad(literal):
        return None
    return frame.add([], None, made(NAN if np.isnan(literal.val) else INF, number))


def _constant(x: Any, number: int, frame: Frame) -> Origin:
    if not checked(jax.typeof(x)):
        return None
    bad = badness(x)
    nan = frame.add([], bad == NOT_A_NUMBER, made(NAN, number))
    return frame.add([nan], bad, made(INF, number))


def _has_bad_constants(jaxpr: Any) -> bool:
    inner = _jax.open_jaxpr(jaxpr)
    if any(checked(jax.typeof(c)) for c in _jax.jaxpr_consts(jaxpr)):
        return True
    for eqn in inner.eqns:
        literals = (v for v in eqn.invars if isinstance(v, _jax.Literal))
        if any(map(_is_bad, literals)):
            return True
        if any(map(_has_bad_constants, bodies(eqn))):
            return True
    return False
