"""`stop_gradient` on the inputs of while loops whose results reach hidden states, as in braintrace.

JAX cannot differentiate a while loop in reverse. braintrace stops the gradients at the inputs of
every loop whose results reach a hidden state, so that a step always has a gradient. Gradients with
respect to the perturbation of that state remain exact; the loop passes none to anything upstream.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._frameworks.recurrent_cells import StatefulProgram
from tapax._jax import Atom, Equation, Jaxpr, OpenJaxpr, Var
from tapax._jaxpr.bodies import list_equations
from tapax._jaxpr.evaluate import inline
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.rewrite import rewrite
from tapax._marks.user_warning import warn_user


def detach_loops(program: StatefulProgram) -> StatefulProgram:
    """Stop the gradients at the inputs of while loops that reach hidden states, with a warning."""
    if not any(kind_of(eqn) is Kind.WHILE for eqn in list_equations(program.jaxpr)):
        return program
    jaxpr = inline(program.jaxpr, Kind.JIT)
    found = _find_loops(_jax.open_jaxpr(jaxpr), _find_hidden_results(program, jaxpr))
    if not found:
        return program

    def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
        del names
        if found.keys().isdisjoint(eqn.outvars):
            yield eqn
            return
        operands: list[Atom] = []
        for atom in eqn.invars:
            operands.append(atom)
            if not isinstance(atom, _jax.Literal) and jnp.issubdtype(atom.aval.dtype, jnp.inexact):
                stopped = _stop_gradient(atom)
                operands[-1] = stopped.outvars[0]
                yield stopped
        yield eqn.replace(invars=operands)

    states = ", ".join(dict.fromkeys(repr(name) for names in found.values() for name in names))
    warn_user(
        f"A while loop reaches the hidden states {states}, and JAX cannot differentiate it in "
        "reverse. As in braintrace, stop_gradient detaches its inputs: the gradients of "
        "parameters, inputs and other hidden states are zero on the path through the loop. "
        "tapax.hidden.add_hidden_perturbation leaves the loop as it is."
    )
    return dataclasses.replace(program, jaxpr=rewrite(jaxpr, visit))


def _find_hidden_results(program: StatefulProgram, jaxpr: Jaxpr) -> dict[Var, list[str]]:
    """Find the results that are hidden states, with the names of these states."""
    outvars = _jax.open_jaxpr(jaxpr).outvars
    index = len(outvars) - sum(state.num_leaves for state in program.states)
    found: dict[Var, list[str]] = {}
    for state in program.states:
        if state.hidden_type is not None and not isinstance(outvars[index], _jax.Literal):
            found.setdefault(outvars[index], []).append(state.name)
        index += state.num_leaves
    return found


def _find_loops(inner: OpenJaxpr, results: Mapping[Var, Iterable[str]]) -> dict[Var, set[str]]:
    """Find the results of while loops that reach hidden states, with the names of these states."""
    reaches = {variable: set(names) for variable, names in results.items()}
    found: dict[Var, set[str]] = {}
    for eqn in reversed(inner.eqns):
        names = set[str]().union(*(reaches.get(v, ()) for v in eqn.outvars))
        if not names:
            continue
        if kind_of(eqn) is Kind.WHILE:
            found.update((variable, names) for variable in eqn.outvars)
        for atom in eqn.invars:
            if not isinstance(atom, _jax.Literal):
                reaches.setdefault(atom, set()).update(names)
    return found


def _stop_gradient(variable: Var) -> Equation:
    """Make an equation that stops the gradient of a variable."""
    # A new function each time: JAX caches traces, and a cached one would share its variables.
    made = jax.make_jaxpr(functools.partial(jax.lax.stop_gradient))(variable.aval)
    (eqn,) = _jax.open_jaxpr(made).eqns
    return eqn.replace(invars=[variable])
