"""`HiddenPerturbation` under the names and in the forms of braintrace.

>>> import brainstate
>>> from tapax.compat import braintrace
>>> gru = braintrace.nn.GRUCell(3, 4)
>>> _ = brainstate.nn.init_all_states(gru)
>>> inputs = brainstate.random.randn(3)
>>> hidden_perturb = braintrace.add_hidden_perturbation_in_module(gru, inputs)
>>> isinstance(hidden_perturb, braintrace.HiddenPerturbation)
True

Fields and arguments with lists have one entry for each hidden state, in the order in which the
module reads its states. `nn` holds the recurrent cells of brainstate that braintrace has too; they
compute the same, and their parameters have no eligibility traces: `tapax.hidden.online` learns
online. `perturb_data_to_hidden_group_data` takes groups found here, or by braintrace.

It does what braintrace does where `tapax.hidden` does something else:

- Every hidden state has one perturbation, at its last write. `tapax.hidden` has one for each write.
- Groups without dynamics, whose states depend on old ones through products with matrices alone,
  come last.
- States in different items of a list, `("layers", 0, "h")` and `("layers", 1, "h")`, are never in
  one group, even if one drives the other unit by unit.
- `stop_gradient` cuts a while loop whose results reach a hidden state off from its inputs, with a
  warning: the loop passes no gradients on to anything upstream. `tapax.hidden` leaves the loop as
  it is: forward derivatives go through it, and JAX raises for reverse ones.

Where it differs from braintrace, braintrace loses something. Here, two states that are written with
one value have a perturbation each; a write in a jitted function, a long loop or a branch is
perturbed too; a product with a sparse matrix of brainevent separates two groups; an equation may
read several states; and Jacobians are exact where units meet without a matrix.
"""

import types
from typing import Any

import brainstate

from tapax._frameworks.interface import Module
from tapax._frameworks.recurrent_cells import StatefulProgram, StatePath, join_inputs, refuse_other
from tapax._frameworks.registry import stateful_program
from tapax.compat._braintrace_groups import HiddenGroup, find_groups
from tapax.compat._braintrace_loops import detach_loops
from tapax.hidden import HiddenPerturbation
from tapax.hidden._hidden_perturbation import perturb_writes
from tapax.hidden._state_writes import find_named_writes

__all__ = [
    "HiddenGroup",
    "HiddenPerturbation",
    "add_hidden_perturbation_in_module",
    "find_hidden_groups_from_module",
    "nn",
]

_CELLS = ("GRUCell", "LSTMCell", "MGUCell", "URLSTMCell", "ValinaRNNCell")

nn = types.SimpleNamespace(**{name: getattr(brainstate.nn, name) for name in _CELLS})


def add_hidden_perturbation_in_module(
    model: Module, *model_args: Any, **model_kwargs: Any
) -> HiddenPerturbation:
    """Adds a perturbation to every hidden state of a module of brainstate, called on the arguments.

    `eval_jaxpr` of the result takes the leaves of `(model_args, model_kwargs)` and then the values
    of all states of the module, in the order in which it reads them; it returns the output and then
    those values. It warns of a while loop that it cuts off from its inputs.
    """
    program = detach_loops(_trace(model, model_args, model_kwargs))
    return perturb_writes(find_named_writes(program, last_only=True), program)


def find_hidden_groups_from_module(
    model: Module, *model_args: Any, include_recurrent_mixing: bool = False, **model_kwargs: Any
) -> tuple[list[HiddenGroup], dict[StatePath, HiddenGroup]]:
    """Finds the hidden groups of a module of brainstate, and the group of each hidden state.

    With `include_recurrent_mixing`, products with matrices connect states too, and are a part of
    the transitions.
    """
    groups = find_groups(_trace(model, model_args, model_kwargs), include_recurrent_mixing)
    return groups, {path: group for group in groups for path in group.hidden_paths}


def _trace(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StatefulProgram:
    program = stateful_program(model, join_inputs(args, kwargs), None)
    if program is None:
        refuse_other(model, "tapax.hidden takes those of every framework, this one brainstate's.")
    return program
