"""A checksum of a traced program, which is equal in every process that traces the same function.

It covers the operations, how they are connected, their types and literals, and the parameters that
are plain values. It leaves out constants, source lines, and objects whose text contains an address
or the order of a set.

>>> import jax
>>> double, triple = (jax.make_jaxpr(lambda x, n=n: n * x)(1.0) for n in (2.0, 3.0))
>>> again = jax.make_jaxpr(lambda y: 2.0 * y)(1.0)
>>> digest(double) == digest(again), digest(double) == digest(triple)
(True, False)
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tapax import _jax
from tapax._jax import Atom, Equation, Jaxpr
from tapax._jaxpr.bodies import bodies

_PLAIN = (type(None), bool, int, float, complex, str, np.dtype)


def digest(jaxpr: Jaxpr) -> str:
    """Compute the checksum of a program, as eight hexadecimal digits."""
    return _Digests().of(jaxpr)[:8]


class _Digests:
    """The checksums of the bodies of a program, each computed once."""

    def __init__(self) -> None:
        # With each body, so that no other body takes its id.
        self._known: dict[int, tuple[Any, str]] = {}

    def of(self, jaxpr: Any) -> str:
        opened = _jax.open_jaxpr(jaxpr)
        if id(opened) not in self._known:
            text = "\n".join(self._lines(opened))
            self._known[id(opened)] = opened, hashlib.sha256(text.encode()).hexdigest()
        return self._known[id(opened)][1]

    def _lines(self, jaxpr: Any) -> Iterator[str]:
        numbers: dict[Any, int] = {}
        for v in (*jaxpr.constvars, *jaxpr.invars):
            numbers[v] = len(numbers)
            yield _type(v)
        for eqn in jaxpr.eqns:
            operands = [_operand(v, numbers) for v in eqn.invars]
            for v in eqn.outvars:
                numbers[v] = len(numbers)
            types = [_type(v) for v in eqn.outvars]
            inner = [self.of(body) for body in bodies(eqn)]
            yield f"{eqn.primitive.name} {operands} {types} {_plain_parameters(eqn)} {inner}"
        yield str([_operand(v, numbers) for v in jaxpr.outvars])


def _type(v: Atom) -> str:
    aval: Any = v.aval
    return f"{getattr(aval, 'dtype', aval)}{list(getattr(aval, 'shape', ()))}"


def _operand(v: Atom, numbers: dict[Any, int]) -> str:
    if isinstance(v, _jax.Literal):
        return f"{_type(v)} {np.asarray(v.val).tolist()!r}"
    return str(numbers[v])


def _plain_parameters(eqn: Equation) -> dict[str, str]:
    return {key: repr(value) for key, value in sorted(eqn.params.items()) if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, _jax.SEQUENCES):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) and not isinstance(value, enum.Enum)
