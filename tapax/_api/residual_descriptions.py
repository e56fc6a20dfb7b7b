"""Descriptions of kept values in the user's terms: site, operation, source line and size."""

import math
from collections.abc import Callable

from tapax import _jax
from tapax._api.kept_values import KeptValue, look_through
from tapax._calling.source_lines import line_of
from tapax._jax import Atom, Equation
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.producers import Body, Value, find_initial, find_source, find_value
from tapax._marks.scopes import Scopes, path_in, scopes_of
from tapax._marks.tap import tap_p
from tapax._results import Residual

_VALUE_TAPS = ("value", "recomputed", "copy")


class ResidualDescriber:
    """Describes the values that one program keeps; `name_argument` names its inputs."""

    def __init__(self, name_argument: Callable[[int], str]):
        self._name_argument = name_argument
        self._taps: dict[Body, dict[Atom, Equation]] = {}

    def describe(self, kept: KeptValue) -> Residual:
        """Describe a kept value."""
        value, aval = kept.value, kept.aval
        source = find_value(value.body, value.atom, _look_through_copies)
        source = (find_initial if kept.given else find_source)(source, _look_through_copies)
        if source.equation is None and value.equation is not None and not kept.given:
            source = value  # a copy of an argument
        eqn = source.equation
        if eqn is None and source.input is not None and source.body.outer is None:
            site = self._name_argument(source.input)
        else:
            site = self._site_of(value) or self._site_of(source)
        is_constant = eqn is None and source.input is None
        return Residual(
            site=site,
            operation="" if eqn is None else _jax.operation_name(eqn),
            source="" if eqn is None else line_of([*source.body.callers, eqn]),
            shape=tuple(aval.shape),
            dtype=aval.dtype,
            nbytes=math.prod(value.loops) * _jax.device_nbytes(value.atom.aval),
            loops=tuple(f"scan[{length}]" for length in value.loops),
            name=_find_name(value),
            on_host=_jax.is_on_host(aval),
            kind="constant" if is_constant else "argument" if kept.given else "computed",
        )

    def _site_of(self, value: Value) -> str:
        """Return the first site of a value, or the innermost scope in which it is computed."""
        scopes: Scopes = ()
        for caller in value.body.callers:
            scopes = scopes_of(caller, scopes)
        if isinstance(value.atom, _jax.Literal):
            return ""
        tap = self._taps_in(value.body).get(value.atom)
        if tap is not None:
            return tap.params["mark"].within(scopes_of(tap, scopes)).path
        return "" if value.equation is None else path_in(scopes_of(value.equation, scopes), "")

    def _taps_in(self, body: Body) -> dict[Atom, Equation]:
        """Find the first tap on each variable of a body."""
        if body not in self._taps:
            found: dict[Atom, Equation] = {}
            for eqn in body.jaxpr.eqns:
                if eqn.primitive is not tap_p or eqn.params["kind"] not in _VALUE_TAPS:
                    continue
                if not isinstance(eqn.invars[0], _jax.Literal):
                    first = found.setdefault(eqn.invars[0], eqn)
                    found.setdefault(eqn.outvars[0], first)
            self._taps[body] = found
        return self._taps[body]


def _look_through_copies(eqn: Equation, number: int) -> Atom | None:
    """Look through copies, too, because they compute nothing."""
    return eqn.invars[number] if kind_of(eqn) & Kind.COPY else look_through(eqn, number)


def _find_name(value: Value) -> str:
    """Find the name that `checkpoint_name` gives to a value, or to the value that it copies."""
    while value.made is not None:
        eqn, number = value.made
        name = _jax.operation(eqn.primitive, eqn.params)[1]
        operand = _look_through_copies(eqn, number)
        if name is not None or operand is None:
            return name or ""
        value = Value(value.body, operand)
    return ""
