"""The values that a traced function keeps for its backward pass.

The program of a function that takes gradients itself contains the backward pass: the kept values
are the values of the forward pass that the backward pass reads. Any other function is a loss:
tapax differentiates it, and JAX reports the values that it keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import reduce_precision_p

from tapax import _jax
from tapax._calling.program import ResultNumber, TracedCall
from tapax._jax import AbstractValue, Atom, Equation, Jaxpr, typed
from tapax._jaxpr.backward_reads import BackwardRead, backward_reads, takes_gradient
from tapax._jaxpr.evaluate import evaluate
from tapax._jaxpr.producers import Body, Value, find_value
from tapax._marks.marked_jaxprs import quieted
from tapax._marks.operations import internal_operations
from tapax._marks.tap import tap_p

RematPolicy: TypeAlias = Callable[..., Any]
"""A policy of `jax.checkpoint`: it decides which results of operations are kept."""


@dataclasses.dataclass(frozen=True)
class KeptValue:
    """A value that a function keeps for its backward pass, and the type of the kept array.

    `given` is true for an argument of the differentiated function, and for a constant.
    """

    value: Value
    aval: AbstractValue
    given: bool


def find_kept(call: TracedCall, name: str, policy: RematPolicy | None) -> list[KeptValue]:
    """Find the values that a traced function keeps for its backward pass, each array once.

    A loss is differentiated under `policy`. A function that takes its gradient itself has been
    traced under the policy already. Errors call the function `name`.
    """
    jaxpr = call.program.jaxpr
    loss = _find_loss(call)
    if takes_gradient(jaxpr) and (loss is None or not _needs_backward_pass(jaxpr, loss)):
        return _distinct(backward_reads(Body(jaxpr)))
    if loss is None:
        raise TypeError(
            f"{name} does not return a loss (a real number, alone or first in a tuple) and does "
            "not take a gradient itself, so it has no backward pass and keeps no values for one. "
            "Pass `residuals` the loss, or the step that takes its gradient."
        )
    root = Body(_linearize(jaxpr, loss, name, policy))
    return _distinct(BackwardRead(root, atom, given=False) for atom in root.jaxpr.outvars)


def _find_loss(call: TracedCall) -> int | None:
    """Return the number of the loss among the results: a real number, alone or first in a tuple."""
    first = call.returned
    if isinstance(first, tuple) and first:
        first = first[0]
    if not isinstance(first, ResultNumber):
        return None
    aval = _jax.open_jaxpr(call.program.jaxpr).outvars[first.number].aval
    return None if aval.shape or not jnp.issubdtype(aval.dtype, jnp.floating) else first.number


def _needs_backward_pass(jaxpr: Jaxpr, result: int) -> bool:
    """Return whether a result depends on a gradient, as a loss with a gradient penalty does."""
    return takes_gradient(_jax.dce(quieted(jaxpr, grads=True), [result]))


def _linearize(jaxpr: Jaxpr, loss: int, name: str, policy: RematPolicy | None) -> Jaxpr:
    """Trace the forward pass of a loss; its results are the values kept for the backward pass."""
    types = [v.aval for v in _jax.open_jaxpr(jaxpr).invars]
    if not any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in types):
        raise TypeError(
            f"No argument of {name} contains real or complex numbers, so there is nothing with "
            "respect to which to differentiate the loss. Pass the parameters as arguments."
        )

    def run(*arrays: Any) -> Any:
        return evaluate(jaxpr, arrays)[loss]

    def forward(*arrays: Any) -> Any:
        differentiated = run if policy is None else typed.checkpoint(run, policy=policy)
        value, pullback = typed.vjp(differentiated, *arrays)
        # JAX rejects operations without a backward pass, such as a while loop, only in this call.
        pullback(typed.ones(value.shape, value.dtype))
        return jax.tree.leaves(pullback)

    with internal_operations(), _jax.known_loops(), jax.disable_jit(False):
        return typed.make_jaxpr(forward)(*types)


def _distinct(reads: Iterable[BackwardRead]) -> list[KeptValue]:
    """Trace reads back to the distinct values that they read.

    Literals in the program, and arrays without elements, take no memory and are left out.
    """
    found: dict[Value, KeptValue] = {}
    for read in reads:
        value = find_value(read.body, read.atom, look_through)
        if isinstance(value.atom, _jax.Literal):
            continue
        aval = read.atom.aval if value.body.entered else value.atom.aval
        is_fixed = value.equation is None and not value.body.entered
        kept = KeptValue(value, aval, given=read.given or is_fixed)
        before = found.get(value)
        # An argument of one gradient may be a value that another gradient computes.
        if getattr(aval, "size", 1) and (before is None or before.given):
            found[value] = kept
    return list(found.values())


def look_through(eqn: Equation, number: int) -> Atom | None:
    """Return the operand that a result copies: in a tap, and in the rounding of a remat value."""
    is_operand = eqn.primitive is reduce_precision_p or (eqn.primitive is tap_p and number == 0)
    return eqn.invars[0] if is_operand else None
