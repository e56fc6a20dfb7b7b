"""`add_hidden_perturbation`: add a perturbation variable where a step defines a hidden state."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core.primitives import convert_element_type_p

from tapax import _jax
from tapax._frameworks.recurrent_cells import StatefulProgram, find_written_name, join_inputs
from tapax._frameworks.registry import stateful_program
from tapax._jax import Atom, Equation, PyTree, Var
from tapax._jaxpr.rewrite import rewrite
from tapax.hidden._definitions import Definition
from tapax.hidden._hidden_perturbation import HiddenPerturbation, interfaces
from tapax.hidden._pure_step import trace_step_or_module
from tapax.hidden._state_writes import WrittenProgram, find_named_writes, find_step_writes, retrace
from tapax.hidden._step import Step


def add_hidden_perturbation(
    step: Any, *inputs: PyTree, state: PyTree = None, **keywords: PyTree
) -> HiddenPerturbation:
    """Add a perturbation to every hidden state of a step.

    `h = f(x)` becomes `h = f(x) + p`, and everything that the step computes from `h` sees the sum.
    With zeros nothing changes, and the derivative of a loss with respect to `p` is the derivative
    with respect to the hidden state, including the path through the output of the step.

    The program, `perturb_jaxpr`, takes the leaves of `(state, *inputs)`, with keyword inputs in the
    order of their names, and then the perturbations, and returns the leaves of `(state, out)`. For
    a module that writes its hidden states in place, it takes the inputs and then the values of all
    states of the module, in the order in which the module reads them, and returns the output and
    then those values.

    Args:
        step: A function `step(state, *inputs) -> (state, out)`, whose state is any pytree of
            floating-point arrays; or a recurrent module of a supported framework.
        *inputs: Example arguments: the state and then the inputs if `step` is a function, the
            inputs alone if `step` is a module.
        state: An example state, if `step` is a module. A cell of a framework has a default, its
            initial state.
        **keywords: Example keyword inputs.

    Returns:
        A `HiddenPerturbation`.

    Raises:
        HiddenError: If `step` is neither a step nor a recurrent module, if it does not return a
            state like the one it takes, or if a hidden state is not a floating-point array.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def step(state, x):
        ...     h = jnp.tanh(state["h"] + x)
        ...     return {"h": h}, 3 * h
        >>> state, x = {"h": jnp.array([0.5, -1.0])}, jnp.array([1.0, 2.0])
        >>> perturbation = tapax.hidden.add_hidden_perturbation(step, state, x)
        >>> perturbation
        HiddenPerturbation(h: float32[2])
        >>> def loss(p):
        ...     new, out = perturbation(p, state, x)
        ...     return jnp.sum(new["h"]) + jnp.sum(out)
        >>> jax.grad(loss)(perturbation.zeros())["h"].tolist()
        [4.0, 4.0]
    """
    inputs = join_inputs(inputs, keywords)
    program = stateful_program(step, inputs, state)
    if program is not None:
        return perturb_writes(find_named_writes(program), program)
    traced = trace_step_or_module(step, inputs, state)
    return perturb_writes(find_step_writes(traced), traced)


def perturb_writes(
    program: WrittenProgram, interface: Step | StatefulProgram
) -> HiddenPerturbation:
    """Add a variable to each definition of a program."""
    writes = program.writes
    made = _edit(program) or retrace(program.jaxpr, program.definitions, writes)
    perturbation = HiddenPerturbation(
        _jax.open_jaxpr(made).invars[-len(writes) :],
        [w.path for w in writes],
        [w.state for w in writes],
        made,
    )
    interfaces[made] = interface
    return perturbation


def _edit(program: WrittenProgram) -> Any | None:
    """Insert the sums into a simple program, faster than `retrace`; None if it is not simple."""
    jaxpr, found = program.jaxpr, program.definitions
    definitions = [*found.at.values(), *found.results.values()]
    if found.within or any(d.path for d in definitions):
        return None
    sums = {w.name: _sum(i, w.shape, w.dtype) for i, w in enumerate(program.writes)}
    variables = [equation.invars[1] for equation in sums.values()]

    def add(definition: Definition, value: Atom) -> Equation:
        equation = sums[definition.key]
        value = definition.root if definition.shared else value
        return equation.replace(invars=[value, equation.invars[1]])

    def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
        if _does_nothing(eqn):
            names[eqn.outvars[0]] = eqn.invars[0]
        else:
            yield eqn
        for variable in eqn.outvars:
            if variable in found.at:
                added = add(found.at[variable], names.get(variable, variable))
                names[variable] = added.outvars[0]
                yield added

    edited = rewrite(jaxpr, visit, more_inputs=variables)
    inner = _jax.open_jaxpr(edited)
    eqns, outvars = list(inner.eqns), list(inner.outvars)
    for index, definition in found.results.items():
        if definition.root is None or definition.shared:
            eqns.append(add(definition, outvars[index]))
            outvars[index] = eqns[-1].outvars[0]
    return _jax.with_open_jaxpr(edited, inner.replace(eqns=eqns, outvars=outvars))


def _does_nothing(eqn: Equation) -> bool:
    if eqn.primitive is convert_element_type_p:
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    return find_written_name(eqn) is not None


@functools.lru_cache(maxsize=256)
def _sum(number: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Make an equation that adds two values of a type, with different variables for each number."""
    del number
    like = jax.ShapeDtypeStruct(shape, dtype)
    # A new function each time: JAX caches traces, and a cached one would share its variables.
    made = jax.make_jaxpr(lambda x, y: x + y)(like, like)
    (eqn,) = _jax.open_jaxpr(made).eqns
    return eqn
