"""Definitions of the new hidden states of a step, and how to run the step with other values.

The program of a step returns its new states, and may compute other results from them, such as a
read-out. So a state is replaced where the program *defines* it, and every later operation sees the
replacement. `find_definitions` finds the definitions; `evaluate_defined` runs the program, and
replaces each defined value by the result of a function:

>>> import jax, jax.numpy as jnp
>>> def step(h, x):
...     h = jnp.sin(h) + x
...     return h, 3 * h
>>> program = jax.make_jaxpr(step)(0.0, 1.0)
>>> found = find_definitions(program, {0: "h"})
>>> h, out = evaluate_defined(program, [0.0, 1.0], found, lambda key, value: value + 10)
>>> float(h), float(out)
(11.0, 33.0)

A definition may be in the body of a jit. It may be in the body of a remat, a branch or a scan if
other results of that equation depend on it. The value is replaced inside that body; in a scan, in
the last iteration, which is peeled off the loop. A state that leaves a while loop, or a call with a
custom derivative, is defined by that equation; a warning tells if its other results depend on the
state.

Copies are not definitions, nor are reshaped or transposed values: the definition is the original
value. If several states have one value, it is the definition of all of them, but later operations
read only the first state: the others are replaced separately, where they are returned. A value that
is rounded to another type is a new value.

A program may state that it writes a value as a state, with an equation that copies the value. Later
reads of the state are reads of that copy. So a state that is computed from another depends on that
state, and a state with several writes has several definitions.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    convert_element_type_p,
    reshape_p,
    slice_p,
    squeeze_p,
    transpose_p,
)

from tapax import _jax
from tapax._jax import Atom, Equation, Jaxpr, OpenJaxpr, PyTree, Value, Var
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.dataflow import computed_from
from tapax._jaxpr.evaluate import bind_in_context, evaluate
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.restage import Scan, bind_cond, bind_remat
from tapax._marks.tap import tap_p
from tapax._marks.user_warning import warn_user

Write = Callable[[str, Any], Any]
"""A function from the key and the value of a definition to its replacement."""

_Evaluated = tuple[list[Value], list[Value]]
"""The results of a body, and the values of its states before their replacement."""
_RESHAPING = frozenset({broadcast_in_dim_p, reshape_p, slice_p, squeeze_p})
"""Operations that may keep all elements in their order."""
_OPENED = Kind.JIT | Kind.REMAT | Kind.COND


@dataclasses.dataclass(frozen=True)
class Definition:
    """The definition of a state: a variable of the body, `root`, or a result or a write itself.

    The equations in `moves` lead from the root to the result of the body, and those in `beyond`
    from that result to the state. The root of a `shared` definition defines another state.
    """

    key: str
    root: Any
    moves: tuple[Any, ...]
    beyond: tuple[Any, ...]
    shared: bool

    @property
    def path(self) -> tuple[Any, ...]:
        return (*self.moves, *self.beyond)


@dataclasses.dataclass(frozen=True)
class Definitions:
    """The definitions of states in a body: of variables, of results, and in bodies of equations."""

    at: Mapping[Any, Definition]
    results: Mapping[int, Definition]
    within: Mapping[int, tuple[Definitions, ...]]


def find_definitions(
    jaxpr: Jaxpr,
    wanted: Mapping[int, str],
    writes: Mapping[Any, str] | None = None,
    *,
    in_loops: bool = True,
) -> Definitions:
    """Find the definitions of some results of a program, by number, and of the copies in `writes`.

    Unless `in_loops`, it does not look into scans.
    """
    keyed = {i: (key, ()) for i, key in wanted.items()}
    return _find(jaxpr, keyed, writes or {}, in_loops)


def _find(
    jaxpr: Jaxpr,
    wanted: Mapping[int, tuple[str, tuple[Any, ...]]],
    writes: Mapping[Any, str],
    in_loops: bool,
) -> Definitions:
    inner = _jax.open_jaxpr(jaxpr)
    made = _made(inner)
    at: dict[Any, Definition] = {}
    results: dict[int, Definition] = {}
    opened: dict[int, dict[int, tuple[str, tuple[Any, ...]]]] = defaultdict(dict)
    claimed: set[Any] = set()

    def define(key: str, atom: Atom, beyond: tuple[Any, ...]) -> Definition:
        root, moves = find_origin(inner, made, atom, writes)
        if root is None or root in writes:
            return Definition(key, None, (), beyond, False)
        found = Definition(key, root, moves, beyond, root in claimed)
        if not found.shared:
            claimed.add(root)
            number, result = made[root]
            if _opens(inner.eqns[number], result, in_loops):
                opened[number][result] = key, found.path
            else:
                at[root] = found
                _warn_of_others(inner, number, result, key)
        return found

    for copy, key in writes.items():
        found = define(key, inner.eqns[made[copy][0]].invars[0], ())
        if found.root is None or found.shared:
            at[copy] = found
    for index, (key, beyond) in wanted.items():
        results[index] = define(key, inner.outvars[index], beyond)
    within = {
        number: tuple(_find(body, inside, {}, in_loops) for body in _openable(inner.eqns[number]))
        for number, inside in opened.items()
    }
    return Definitions(at, results, within)


def _made(inner: OpenJaxpr) -> dict[Any, tuple[int, int]]:
    """Map each variable to the number of its equation, and of the result."""
    return {v: (i, j) for i, eqn in enumerate(inner.eqns) for j, v in enumerate(eqn.outvars)}


def find_origin(
    inner: OpenJaxpr, made: Mapping[Any, tuple[int, int]], atom: Atom, writes: Container[Any] = ()
) -> tuple[Any, tuple[Any, ...]]:
    """Find the variable, or the write, that a value copies, and the equations that move it.

    The variable is None if the body does not compute it.
    """
    moves: list[Any] = []
    while not isinstance(atom, _jax.Literal) and atom in made:
        number, place = made[atom]
        eqn = inner.eqns[number]
        if atom in writes or not (is_copy(eqn, place) or _is_move(eqn)):
            return atom, tuple(reversed(moves))
        if not is_copy(eqn, place):
            moves.append(eqn)
        atom = eqn.invars[place]
    return None, ()


def is_copy(eqn: Equation, place: int = 0) -> bool:
    """Return whether a result of an equation equals the operand at the same position."""
    if eqn.primitive is convert_element_type_p:
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    if eqn.primitive is tap_p:
        return place == 0
    return bool(kind_of(eqn) & Kind.COPY)


def _is_move(eqn: Equation) -> bool:
    """Return whether an equation only moves elements: it keeps each of them exactly once."""
    if eqn.primitive is transpose_p:
        return True
    same = len(eqn.invars) == 1 and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    return eqn.primitive in _RESHAPING and same


def _there(moves: Sequence[Any], value: PyTree) -> Any:
    for eqn in moves:
        (value,) = _jax.bind_equation(eqn, [value])
    return value


def _back(moves: Sequence[Any], value: PyTree) -> Any:
    for eqn in reversed(moves):
        if eqn.primitive is transpose_p:
            value = jnp.transpose(value, np.argsort(eqn.params["permutation"]).tolist())
        else:
            value = jnp.reshape(value, eqn.invars[0].aval.shape)
    return value


def _openable(eqn: Equation, in_loops: bool = True) -> list[Jaxpr]:
    kind = kind_of(eqn)
    is_loop = kind is Kind.SCAN and in_loops and eqn.params["length"]
    return bodies(eqn) if is_loop or kind & _OPENED else []


def _opens(eqn: Equation, place: int, in_loops: bool = True) -> bool:
    """Return whether a result has to be replaced in the body, because other results read it."""
    kind = kind_of(eqn)
    if kind is Kind.JIT:
        return True
    if kind is Kind.SCAN and place >= _jax.scan_split(eqn.params)[1]:
        return False
    found = _openable(eqn, in_loops)
    return any(_has_others(_jax.open_jaxpr(body), place) for body in found)


def _warn_of_others(inner: OpenJaxpr, number: int, place: int, key: str) -> None:
    """Warn if other results depend on the value of a state in a way that a definition misses."""
    eqn = inner.eqns[number]
    if eqn.primitive is convert_element_type_p:
        (before,) = eqn.invars
        users = [e for e in inner.eqns if e is not eqn and any(v is before for v in e.invars)]
        if users or any(v is before for v in inner.outvars):
            types = f"{before.aval.dtype} to {eqn.outvars[0].aval.dtype}"
            warn_user(
                f"The hidden state {key!r} is rounded from {types}, and other results depend on "
                "the value before rounding: a derivative with respect to the state misses them."
            )
        return
    stacked = kind_of(eqn) is Kind.SCAN and place >= _jax.scan_split(eqn.params)[1]
    if len(eqn.outvars) < 2 or stacked:
        return
    for body in bodies(eqn):
        inner = _jax.open_jaxpr(body)
        if len(inner.outvars) == len(eqn.outvars) and _has_others(inner, place):
            warn_user(
                f"The hidden state {key!r} is a result of a {_jax.operation_name(eqn)}, which "
                "computes other results from it inside: a derivative with respect to the state "
                "misses them."
            )
            return


def _has_others(inner: OpenJaxpr, place: int) -> bool:
    """Return whether other results of a body depend on the result at `place`."""
    made = _made(inner)
    root, _ = find_origin(inner, made, inner.outvars[place])
    if root is None:
        return False
    number, at = made[root]
    reached = {root}
    # The equation that makes the value may compute its other results from it.
    if _opens(inner.eqns[number], at):
        reached.update(inner.eqns[number].outvars)
    reached = computed_from(inner.eqns[number + 1 :], reached)
    others = (v for i, v in enumerate(inner.outvars) if i != place)
    return any(v in reached for v in others if not isinstance(v, _jax.Literal))


def evaluate_defined(
    jaxpr: Jaxpr, args: Sequence[Value], found: Definitions, write: Write
) -> list[Value]:
    """Evaluate a program, and replace its definitions by the results of `write`."""
    return _evaluate(jaxpr, args, found, write)[0]


def _evaluate(jaxpr: Jaxpr, args: Sequence[Value], found: Definitions, write: Write) -> _Evaluated:
    plain: dict[Var, Value] = {}

    def replace(definition: Definition, moves: Sequence[Equation], value: Value) -> Value:
        return _back(moves, write(definition.key, _there(moves, value)))

    def apply(number: int, eqn: Equation, values: list[Value]) -> list[Value]:
        inside = found.within.get(number)
        if inside is None:
            outs = bind_in_context(number, eqn, values)
        else:
            outs, before = _jax.in_context(eqn, _open, eqn, values, inside, write)
            defined = (eqn.outvars[i] for i in inside[0].results)
            plain.update(zip(defined, before, strict=True))
        return [
            define(v, x) if v in found.at else x for v, x in zip(eqn.outvars, outs, strict=True)
        ]

    def define(variable: Var, value: Value) -> Value:
        definition = found.at[variable]
        plain[variable] = value
        if not definition.shared:
            return replace(definition, definition.path, value)
        return write(definition.key, _there(definition.moves, plain[definition.root]))

    results = evaluate(jaxpr, args, apply)
    before = []
    for index, definition in found.results.items():
        value = results[index]
        if definition.root is not None:
            value = _there(definition.moves, plain[definition.root])
        before.append(value)
        if definition.root is None or definition.shared:
            results[index] = replace(definition, definition.beyond, value)
    return results, before


def _open(
    eqn: Equation, args: list[Value], found: tuple[Definitions, ...], write: Write
) -> _Evaluated:
    """Evaluate an equation whose body contains definitions."""
    kind = kind_of(eqn)
    if kind is Kind.JIT:
        return _evaluate(eqn.params["jaxpr"], args, found[0], write)
    if kind is Kind.COND:
        branches = zip(eqn.params["branches"], found, strict=True)
        functions = [_evaluation(body, inside, write) for body, inside in branches]
        return _split(eqn, bind_cond(eqn, args[0], args[1:], functions)[0])
    if kind is Kind.SCAN:
        return _open_scan(Scan.of(eqn, args), found[0], write)
    run = _evaluation(_jax.call_body(eqn), found[0], write)
    body = jax.make_jaxpr(lambda *args: run(*args)[0])(*args)
    return _split(eqn, bind_remat(eqn, body, args, range(len(args))))


def _evaluation(jaxpr: Jaxpr, found: Definitions, write: Write) -> Callable[..., _Evaluated]:
    """Make a function that returns the results of a body, then its states before replacement."""

    def run(*args: Value) -> _Evaluated:
        results, before = _evaluate(jaxpr, args, found, write)
        return [*results, *before], []

    return run


def _split(eqn: Equation, results: Sequence[Value]) -> _Evaluated:
    count = len(eqn.outvars)
    return list(results[:count]), list(results[count:])


def _open_scan(loop: Scan, found: Definitions, write: Write) -> _Evaluated:
    """Evaluate a scan whose last iteration contains definitions."""
    last = 0 if loop.reverse else loop.length - 1
    once = lambda values: _evaluate(loop.body, values, found, write)  # noqa: E731
    return loop.peel(last, _jax.as_function(loop.body), once)
