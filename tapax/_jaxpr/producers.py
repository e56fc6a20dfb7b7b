"""The origin of a value of a program: the equation that computes it, however deep, or an input.

>>> import jax, jax.numpy as jnp
>>> program = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x))(1.0)
>>> root = Body(program)
>>> value = find_value(root, root.jaxpr.outvars[0])
>>> value.equation.primitive
sin

A `Body` is a program together with the equation that runs it. `find_value` follows a variable
through everything that merely renames it: the boundaries of calls, loops and branches. Two
variables with equal `Value`s are one array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from tapax import _jax
from tapax._jax import Atom, Equation, Jaxpr, OpenJaxpr, Var
from tapax._jaxpr.kinds import CALLS, CUSTOM_RULES, LOOPS, Kind, kind_of

LookThrough = Callable[[Equation, int], Atom | None]
"""Returns the operand that an equation passes on as a result, or None if it computes the result."""

_CALLED = CALLS | CUSTOM_RULES | Kind.REMAT | Kind.SHARD_MAP
"""Equations whose operands and results are those of their bodies."""


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A program, with the equation `caller` of the body `outer` that runs it.

    The whole program has no caller. `entered` is true if `find_value` entered the body from
    outside, through a result of the caller. `length` is then the number of iterations of a scan
    over which that result is stacked.
    """

    program: Jaxpr
    caller: Equation | None = None
    outer: Body | None = None
    entered: bool = False
    length: int | None = None
    _children: dict[Any, Body] = dataclasses.field(default_factory=dict[Any, "Body"])

    @functools.cached_property
    def jaxpr(self) -> OpenJaxpr:
        """The open jaxpr, which has the equations."""
        return _jax.open_jaxpr(self.program)

    @functools.cached_property
    def makers(self) -> dict[Var, tuple[Equation, int]]:
        """For each variable, the equation that computes it and the number of that result."""
        return {v: (eqn, i) for eqn in self.jaxpr.eqns for i, v in enumerate(eqn.outvars)}

    @functools.cached_property
    def inputs(self) -> dict[Var, int]:
        """The number of each input; constants are left out."""
        variables = [*self.jaxpr.constvars, *self.jaxpr.invars]
        consts = len(variables) - len(self.jaxpr.invars)
        if not self.jaxpr.constvars:
            consts = len(_jax.jaxpr_consts(self.program))
        return {v: i for i, v in enumerate(variables[consts:])}

    @property
    def callers(self) -> tuple[Equation, ...]:
        """The equations around this body, outermost first."""
        if self.caller is None or self.outer is None:
            return ()
        return (*self.outer.callers, self.caller)

    @property
    def entered_bodies(self) -> Iterator[Body]:
        """This body and the bodies around it, as far as they were entered, outermost first."""
        if self.entered and self.outer is not None:
            yield from self.outer.entered_bodies
            yield self

    def child(
        self, eqn: Equation, program: Jaxpr, *, entered: bool, length: int | None = None
    ) -> Body:
        """Return the body that runs `program` in an equation of this one; equal calls share it."""
        key = id(eqn), id(program), entered, length
        if key not in self._children:
            self._children[key] = Body(program, eqn, self, entered, length)
        return self._children[key]


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of a program: a variable or literal, and its body."""

    body: Body
    atom: Atom

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.body is other.body and self.atom is other.atom

    def __hash__(self) -> int:
        return hash((id(self.body), id(self.atom)))  # literals have no hash

    @property
    def made(self) -> tuple[Equation, int] | None:
        """The equation that computes it and the number of that result; None for an input."""
        if isinstance(self.atom, _jax.Literal):
            return None
        return self.body.makers.get(self.atom)

    @property
    def equation(self) -> Equation | None:
        """The equation that computes it; None for an input, a constant or a literal."""
        return self.made[0] if self.made else None

    @property
    def input(self) -> int | None:
        """Its number among the inputs of its body; None if it is not an input."""
        return None if isinstance(self.atom, _jax.Literal) else self.body.inputs.get(self.atom)

    @property
    def loops(self) -> tuple[int, ...]:
        """The lengths of the scans over which it is stacked, outermost first."""
        return tuple(b.length for b in self.body.entered_bodies if b.length is not None)


def find_value(body: Body, atom: Atom, look_through: LookThrough | None = None) -> Value:
    """Follow a variable to the equation that computes its value, or to an input of the program.

    The search stops at the carries of loops and at the slices that a scan reads, because these
    differ from one iteration to the next. If the branches of a conditional return different values,
    the search follows the first branch that computes its result.
    """
    while True:
        value = Value(body, atom)
        if value.made is not None:
            eqn, number = value.made
            operand = look_through(eqn, number) if look_through else None
            if operand is not None:
                atom = operand
                continue
            inside = _result(value, eqn, number, look_through)
            if inside is None:
                return value
            body, atom = inside.body, inside.atom
            continue
        operand = _operand(value)
        if operand is None or body.outer is None:
            return value
        body, atom = body.outer, operand


def _result(
    value: Value, eqn: Equation, number: int, look_through: LookThrough | None
) -> Value | None:
    """Return the value inside the body of `eqn` that is its result number `number`."""
    body, kind = value.body, kind_of(eqn)
    if kind & _CALLED:
        return _output(body.child(eqn, _jax.call_body(eqn), entered=True), number)
    if kind & Kind.SCAN:
        stacked = number >= _jax.scan_split(eqn.params)[1]
        length = eqn.params["length"] if stacked else None
        return _output(body.child(eqn, eqn.params["jaxpr"], entered=True, length=length), number)
    if kind & Kind.WHILE:
        return _output(body.child(eqn, eqn.params["body_jaxpr"], entered=True), number)
    if kind & Kind.COND:
        branches = [body.child(eqn, b, entered=True) for b in eqn.params["branches"]]
        outputs = [_output(branch, number) for branch in branches]
        # JAX fills in zeros for residuals that a branch does not have.
        return next((x for x in outputs if _is_computed(x, look_through)), outputs[0])
    return None


def _output(body: Body, number: int) -> Value:
    return Value(body, body.jaxpr.outvars[number])


def _is_computed(value: Value, look_through: LookThrough | None) -> bool:
    """Return whether a branch computes a value or takes it from an operand; else it fills it in."""
    found = find_value(value.body, value.atom, look_through)
    eqn = found.equation
    if eqn is None:
        return found.input is not None
    operands = [v for v in eqn.invars if not isinstance(v, _jax.Literal)]
    if kind_of(eqn) & Kind.REARRANGEMENT and operands:
        return _is_computed(Value(found.body, operands[0]), look_through)
    return bool(operands)


def _operand(value: Value) -> Atom | None:
    """Return the operand of the caller for an input of a body; None if it changes in a loop."""
    caller, number = value.body.caller, value.input
    if caller is None or number is None:
        return None
    kind = kind_of(caller)
    if kind & Kind.COND:
        return caller.invars[number + 1]
    if kind & Kind.SCAN:
        consts, carry = _jax.scan_split(caller.params)
        # The stacked slices of an input of a scan are its operand.
        is_operand: bool = number < consts or (
            number >= consts + carry and value.body.length is not None
        )
        return caller.invars[number] if is_operand else None
    if kind & Kind.WHILE:
        before: int = caller.params["cond_nconsts"]
        is_constant: bool = number < caller.params["body_nconsts"]
        return caller.invars[before + number] if is_constant else None
    return caller.invars[number] if kind & _CALLED else None


def find_source(value: Value, look_through: LookThrough | None = None) -> Value:
    """Find the source of a value at which `find_value` stopped because a loop changes it.

    The source of a carry is its value at the end of the previous iteration. If the body returns the
    carry unchanged, the source is the operand of the loop.
    """
    seen: set[Value] = set()
    while value not in seen:
        seen.add(value)
        before = _before(value)
        if before is None:
            return value
        value = find_value(before.body, before.atom, look_through)
        if value in seen:
            value = find_initial(value, look_through)
    return value


def find_initial(value: Value, look_through: LookThrough | None = None) -> Value:
    """Find the operand from which a loop initialises a carry or reads slices."""
    while True:
        caller, number, outer = value.body.caller, value.input, value.body.outer
        if caller is None or number is None or outer is None or not kind_of(caller) & LOOPS:
            return value
        skipped = caller.params["cond_nconsts"] if kind_of(caller) & Kind.WHILE else 0
        value = find_value(outer, caller.invars[number + skipped], look_through)


def _before(value: Value) -> Value | None:
    """Return the result of the previous iteration for a carry, or the operand of a slice."""
    body, number, caller = value.body, value.input, value.body.caller
    if number is None or caller is None or body.outer is None or not kind_of(caller) & LOOPS:
        return None
    if kind_of(caller) & Kind.SCAN:
        consts, carry = _jax.scan_split(caller.params)
    else:
        consts, carry = caller.params["body_nconsts"], len(caller.outvars)
    if number < consts + carry:
        return _output(body, number - consts)
    return Value(body.outer, caller.invars[number])
