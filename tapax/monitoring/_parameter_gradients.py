"""Gradients of parameters: the argument behind each parameter mark, and records of its cotangents.

`find_parameters` follows each argument through the program, from body to body, to the marks that
the wrapped `jax.vjp` puts on the values by which it differentiates: see `_marks.parameters`. The
program may cast and reshape the argument on the way. If several arguments reach one mark, as when
one traced function takes the gradients of several models, the monitor records nothing for the mark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p, reshape_p, squeeze_p, transpose_p

from tapax import _jax
from tapax._jax import Equation, Jaxpr, Value
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.kinds import CALLS, Kind, kind_of
from tapax._marks.parameters import ParameterMark
from tapax._marks.tap import split_shape, tap_p
from tapax._sites import Site
from tapax._walk.entries import Entry
from tapax._walk.interpreter import Interpreter, WalkHooks
from tapax._walk.recorder import MetTap
from tapax._walk.reductions import reduce, refusal
from tapax.reduce import Reducer

_SAME_ELEMENTS = {convert_element_type_p, reshape_p, squeeze_p, transpose_p}
_ONCE = CALLS | Kind.REMAT
"""The kinds of equations that return the results of their body."""

Origin = int | None
"""The index of an argument of the program; None for every other value."""


def find_parameters(jaxpr: Jaxpr) -> tuple[dict[int, int], frozenset[int]]:
    """Find the argument behind each parameter mark: its index, by the `uid` of the mark.

    Also return the arguments that share a mark, whose gradients cannot be told apart.
    """
    found: dict[int, set[Origin]] = {}
    count = len(_jax.open_jaxpr(jaxpr).invars)
    _follow(jaxpr, list(range(count)), found)
    known = {uid: next(iter(origins)) for uid, origins in found.items() if len(origins) == 1}
    shared = frozenset(o for some in found.values() if len(some) > 1 for o in some if o is not None)
    return {uid: origin for uid, origin in known.items() if origin is not None}, shared


def _follow(jaxpr: Jaxpr, origins: Sequence[Origin], found: dict[int, set[Origin]]) -> list[Origin]:
    """Add the origins of parameter marks to `found`; return the origins of the results."""
    inner = _jax.open_jaxpr(jaxpr)
    known: dict[Any, Origin] = dict(zip(inner.invars, origins, strict=True))

    def origin_of(atom: Any) -> Origin:
        return None if isinstance(atom, _jax.Literal) else known.get(atom)

    for eqn in inner.eqns:
        given = [origin_of(v) for v in eqn.invars]
        kind = kind_of(eqn)
        if eqn.primitive is tap_p:
            mark = eqn.params["mark"]
            if isinstance(mark, ParameterMark) and eqn.params["kind"] == "value":
                found.setdefault(mark.uid, set()).add(given[0])
            known[eqn.outvars[0]] = given[0]
        elif kind & Kind.COPY:
            known.update(zip(eqn.outvars, given, strict=False))
        elif eqn.primitive in _SAME_ELEMENTS:
            known[eqn.outvars[0]] = given[0]
        for body in bodies(eqn):
            results = _follow(body, _body_origins(eqn, body, given), found)
            if kind & _ONCE and len(results) == len(eqn.outvars):
                known.update(zip(eqn.outvars, results, strict=True))
    return [origin_of(v) for v in inner.outvars]


def _body_origins(eqn: Equation, body: Jaxpr, given: list[Origin]) -> list[Origin]:
    """Return the origins of the inputs of a body; a carry has that of its initial value."""
    count = len(_jax.open_jaxpr(body).invars)
    if kind_of(eqn) & Kind.WHILE:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = given[first + second :]
        is_test = body is eqn.params["cond_jaxpr"]
        return [*(given[:first] if is_test else given[first : first + second]), *carry]
    if len(given) == count:
        return given
    # The first operand of a conditional is its index.
    return given[1:] if len(given) == count + 1 else [None] * count


@dataclasses.dataclass(frozen=True)
class GradientHooks(WalkHooks):
    """Hooks that record gradients of parameters; `names` maps the `uid` of a mark to a name."""

    names: Mapping[int, str]
    reducers: Mapping[str, Sequence[Reducer]]

    def record(self, walk: Interpreter, tap: MetTap) -> None:
        mark = tap.call.mark
        if not isinstance(mark, ParameterMark):
            walk.record(tap)
            return
        name = self.names.get(mark.uid)
        if name is None or not tap.grad:
            return
        x: Value = tap.values[0]
        mapped = tap.eqn.params["axes"]
        sizes, own = split_shape(tap.eqn)
        site = Site(name, kind="param", shape=(*sizes, *own), dtype=x.dtype)
        x = jnp.moveaxis(x, mapped, tuple(range(len(mapped))))
        for reducer in self.reducers.get(name, ()):
            if refusal(site, reducer, jax.ShapeDtypeStruct(own, x.dtype)) is not None:
                continue
            found, state, valid = reduce(site, reducer, "", [x], len(mapped), tap.active)
            recomputed = tap.eqn.params["kind"] == "grad recomputed"
            walk.entries.append(
                Entry(
                    site,
                    tap.call,
                    True,
                    tuple(state),
                    valid,
                    recomputed=recomputed,
                    reduction=found,
                )
            )
