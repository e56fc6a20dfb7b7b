"""The values that a traced function keeps for its backward pass.

A function that takes gradients itself has the backward pass in its program: the values kept are
those of the forward pass that the backward pass reads. Any other function is a loss: it is
differentiated, and JAX says what it keeps.
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
"""A policy of `jax.checkpoint`: which results of operations may be kept."""


@dataclasses.dataclass(frozen=True)
class KeptValue:
    """A value that is kept, and the type of the array that holds it.

    It is `given` if it is an argument of the differentiated function, or a constant.
    """

    value: Value
    aval: AbstractValue
    given: bool


def find_kept(call: TracedCall, name: str, policy: RematPolicy | None) -> list[KeptValue]:
    """Finds what a traced function keeps for its backward pass, each array once.

    If it is a loss, it is differentiated under `policy`; if it takes its own gradient, it has been
    traced under the policy already. `name` is that of the function, for errors.
    """
    jaxpr = call.program.jaxpr
    loss = _find_loss(call)
    if takes_gradient(jaxpr) and (loss is None or not _needs_backward_pass(jaxpr, loss)):
        return _distinct(backward_reads(Body(jaxpr)))
    if loss is None:
        raise TypeError(
            f"{name} returns no loss (a real number, alone or first in a tuple) and takes no "
            "gradient itself, so it has no backward pass that anything could be kept for: give "
            "`residuals` the loss, or the step that takes its gradient."
        )
    root = Body(_linearize(jaxpr, loss, name, policy))
    return _distinct(BackwardRead(root, atom, given=False) for atom in root.jaxpr.outvars)


def _find_loss(call: TracedCall) -> int | None:
    """The number of the result that is the loss: a real number, alone or first in a tuple."""
    first = call.returned
    if isinstance(first, tuple) and first:
        first = first[0]
    if not isinstance(first, ResultNumber):
        return None
    aval = _jax.open_jaxpr(call.program.jaxpr).outvars[first.number].aval
    return None if aval.shape or not jnp.issubdtype(aval.dtype, jnp.floating) else first.number


def _needs_backward_pass(jaxpr: Jaxpr, result: int) -> bool:
    """Whether a result is computed from a gradient, as that of a loss with a penalty on one."""
    return takes_gradient(_jax.dce(quieted(jaxpr, grads=True), [result]))


def _linearize(jaxpr: Jaxpr, loss: int, name: str, policy: RematPolicy | None) -> Jaxpr:
    """Traces the forward pass of a loss; the results are what it keeps for the backward pass."""
    types = [v.aval for v in _jax.open_jaxpr(jaxpr).invars]
    if not any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in types):
        raise TypeError(
            f"No array in the arguments of {name} holds real or complex numbers, so there is "
            "nothing to differentiate the loss by: pass the parameters as arguments."
        )

    def run(*arrays: Any) -> Any:
        return evaluate(jaxpr, arrays)[loss]

    def forward(*arrays: Any) -> Any:
        differentiated = run if policy is None else typed.checkpoint(run, policy=policy)
        value, pullback = typed.vjp(differentiated, *arrays)
        # JAX refuses what has no backward pass, a while loop for one, only when it is to run.
        pullback(typed.ones(value.shape, value.dtype))
        return jax.tree.leaves(pullback)

    with internal_operations(), _jax.known_loops(), jax.disable_jit(False):
        return typed.make_jaxpr(forward)(*types)


def _distinct(reads: Iterable[BackwardRead]) -> list[KeptValue]:
    """Follows what is read to the values that it is.

    Numbers that are written into the program, and arrays without elements, take no memory.
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
        # What one gradient is given, another may compute.
        if getattr(aval, "size", 1) and (before is None or before.given):
            found[value] = kept
    return list(found.values())


def look_through(eqn: Equation, number: int) -> Atom | None:
    """The operand that a result merely is: of a tap, and of the rounding of what remat keeps."""
    is_operand = eqn.primitive is reduce_precision_p or (eqn.primitive is tap_p and number == 0)
    return eqn.invars[0] if is_operand else None
