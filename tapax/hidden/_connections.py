"""How results of a program depend on its inputs: unit by unit, otherwise, or by mixing.

A *mixing* operation, a product with a matrix or a convolution, is where the units of a network
meet. What one state does to another without a mixing is its dynamics: a leak, a gate, a reset.

>>> import jax, jax.numpy as jnp
>>> def step(h, c, w):
...     c = 0.9 * c + jnp.tanh(w @ h)
...     return jnp.tanh(c), c
>>> program = jax.make_jaxpr(step)(jnp.zeros(3), jnp.zeros(3), jnp.zeros((3, 3)))
>>> for found in find_connections(program, {0: "h", 1: "c"}):
...     print(sorted((name, how.name) for name, how in found))
[('c', 'UNITS'), ('h', 'MIXING')]
[('c', 'UNITS'), ('h', 'MIXING')]
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tapax import _jax
from tapax._jaxpr.bodies import bodies
from tapax._sites import CALLS
from tapax.hidden._definitions import REMAT


class Dependence(enum.IntEnum):
    """A way in which a value depends on an input: unit by unit, otherwise, or by mixing."""

    UNITS = 1
    OTHER = 2
    MIXING = 3


Dependences = frozenset[tuple[Any, Dependence]]
"""The inputs that a value depends on, each with the ways in which it does."""

MIXING = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "CheckpointName", "clamp", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "name", "ne", "neg", "nextafter", "not", "or", "polygamma", "pow", "real",
    "reduce_precision", "regularized_incomplete", "rem", "round", "rsqrt", "select_n",
    "sharding_constraint", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "tap",
    "xor", "zeta",
})  # fmt: skip
"""Operations whose results depend, element by element, on their operands there."""

CUSTOM_VJP = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr", "CustomVJPTraced"})
_CALLS = CALLS | REMAT | CUSTOM_VJP | {"closed_call", "core_call", "CustomJVPTraced"}

NOTHING: Dependences = frozenset()


def find_connections(jaxpr: Any, inputs: Mapping[int, Any]) -> list[Dependences]:
    """Finds which of the named `inputs` each result of a program depends on, and how."""
    count = len(_jax.open_jaxpr(jaxpr).invars)
    seeds = [
        frozenset({(inputs[i], Dependence.UNITS)}) if i in inputs else NOTHING for i in range(count)
    ]
    return _through(jaxpr, seeds)


def _through(jaxpr: Any, args: Sequence[Dependences]) -> list[Dependences]:
    inner = _jax.open_jaxpr(jaxpr)
    missing = len(inner.invars) + len(inner.constvars) - len(args)
    variables = [*inner.constvars, *inner.invars]
    known: dict[Any, Dependences] = dict(zip(variables, [*[NOTHING] * missing, *args], strict=True))

    def read(atom: Any) -> Dependences:
        return NOTHING if isinstance(atom, _jax.Literal) else known.get(atom, NOTHING)

    for eqn in inner.eqns:
        given = [read(v) for v in eqn.invars]
        outs = _equation(eqn, given) if any(given) else [NOTHING] * len(eqn.outvars)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in inner.outvars]


def _equation(eqn: Any, args: list[Dependences]) -> list[Dependences]:
    kind = _jax.kind_of(eqn)
    if kind in _CALLS:
        body = next(bodies(eqn), None)
        if body is not None:
            return _through(body, args)
    if kind == "cond":
        index, *operands = args
        chosen = _at_least(index, Dependence.OTHER)
        found = [_through(branch, operands) for branch in eqn.params["branches"]]
        return [chosen.union(*outs) for outs in zip(*found, strict=True)]
    if kind == "scan":
        return _scan(eqn, args)
    if kind == "while":
        return _while(eqn, args)
    everything = NOTHING.union(*args)
    if kind in MIXING:
        return [_at_least(everything, Dependence.MIXING)] * len(eqn.outvars)
    if kind == "optimization_barrier":
        return args
    shapes = {v.aval.shape for v, found in zip(eqn.invars, args, strict=True) if found}
    if kind in ELEMENTWISE and shapes == {eqn.outvars[0].aval.shape}:
        return [everything] * len(eqn.outvars)
    return [_at_least(everything, Dependence.OTHER)] * len(eqn.outvars)


def _scan(eqn: Any, args: list[Dependences]) -> list[Dependences]:
    consts, carried = _jax.scan_split(eqn.params)
    fixed, carry = args[:consts], args[consts : consts + carried]
    sliced = [_at_least(x, Dependence.OTHER) for x in args[consts + carried :]]
    while True:
        outs = _through(eqn.params["jaxpr"], [*fixed, *carry, *sliced])
        grown = [a | b for a, b in zip(carry, outs, strict=False)]
        if grown == carry:
            stacked = [_at_least(x, Dependence.OTHER) for x in outs[carried:]]
            return [*carry, *stacked]
        carry = grown


def _while(eqn: Any, args: list[Dependences]) -> list[Dependences]:
    before, own = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    asked, fixed, carry = args[:before], args[before : before + own], args[before + own :]
    while True:
        outs = _through(eqn.params["body_jaxpr"], [*fixed, *carry])
        (stop,) = _through(eqn.params["cond_jaxpr"], [*asked, *carry])
        ended = _at_least(stop, Dependence.OTHER)
        grown = [a | b | ended for a, b in zip(carry, outs, strict=True)]
        if grown == carry:
            return carry
        carry = grown


def _at_least(found: Dependences, how: Dependence) -> Dependences:
    return frozenset((name, max(was, how)) for name, was in found)


def list_primitives(jaxpr: Any) -> Iterator[str]:
    """Lists the primitives of a program, those in the bodies of equations included."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield _jax.kind_of(eqn)
        for body in bodies(eqn):
            yield from list_primitives(body)
