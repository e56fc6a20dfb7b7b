"""Equal bodies of equations, replaced by a single one.

JAX lowers a body once for all equations that have it. A program that calls a traced function often
has one body, and a walk that restages these calls makes many equal ones.

>>> import jax
>>> first, second = (jax.make_jaxpr(lambda x: 2.0 * x)(1.0) for _ in range(2))
>>> bodies = SharedBodies()
>>> bodies.share(first) is first, bodies.share(first.replace()) is first
(True, True)
>>> bodies.share(second) is second  # it comes from another call, although its code is equal
True
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from tapax import _jax
from tapax._jax import Equation, Jaxpr


class SharedBodies:
    """The different bodies that were given to `share`, which live as long as this object.

    Equal bodies have equal operations, types, constants, source lines and scopes.
    """

    def __init__(self) -> None:
        self._bodies: dict[Hashable, Jaxpr] = {}
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, tuple[Any, int]] = {}

    def share(self, jaxpr: Jaxpr) -> Jaxpr:
        """Return the body that is equal to this one and came first."""
        try:
            return self._bodies.setdefault(tuple(self._parts(jaxpr)), jaxpr)
        except TypeError:  # a parameter is not hashable
            return jaxpr

    def _parts(self, jaxpr: Jaxpr) -> Iterator[Hashable]:
        """Yield parts that are equal for equal bodies only."""
        inner = _jax.open_jaxpr(jaxpr)
        numbers: dict[Any, int] = {}

        def name(atom: Any) -> Hashable:
            return _literal(atom) if isinstance(atom, _jax.Literal) else numbers[atom]

        for v in (*inner.constvars, *inner.invars):
            numbers[v] = len(numbers)
            yield v.aval
        yield tuple(map(id, _jax.jaxpr_consts(jaxpr)))
        for eqn in inner.eqns:
            yield self._operation(eqn)
            yield tuple(map(name, eqn.invars))
            for v in eqn.outvars:
                numbers[v] = len(numbers)
                yield v.aval
        yield tuple(map(name, inner.outvars))

    def _operation(self, eqn: Equation) -> Hashable:
        # Equations that were restaged unchanged share these objects.
        params = self._number(eqn.params, lambda: _parameters(eqn.params))
        info = eqn.source_info
        source = self._number(info, lambda: (id(info.traceback), info.name_stack))
        return eqn.primitive, params, source, frozenset(eqn.effects), id(eqn.ctx)

    def _number(self, part: Any, contents: Callable[[], Hashable]) -> int:
        """Number a part of an equation, and parts with equal contents alike."""
        found = self._known.get(id(part))
        if found is None:
            number = self._numbers.setdefault(contents(), len(self._numbers))
            found = self._known[id(part)] = part, number
        return found[1]


def _parameters(params: Mapping[str, Any]) -> Hashable:
    return tuple((key, _exact(value)) for key, value in params.items())


def _literal(literal: Any) -> Hashable:
    value: np.ndarray = np.asarray(literal.val)
    return literal.aval, str(value.dtype), value.tobytes()


def _exact(value: Any) -> Any:
    """Tell numbers of other types, and -0.0, apart."""
    if isinstance(value, tuple):
        parts: list[Any] = [_exact(part) for part in cast(Iterable[Any], value)]
        return type(cast(Any, value)), *parts
    if isinstance(value, float):
        return float, value.hex()
    return (type(value), value) if isinstance(value, (bool, int, complex)) else value
