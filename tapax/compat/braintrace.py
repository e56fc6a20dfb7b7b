"""`HiddenPerturbation` under the names and in the forms of braintrace.

>>> import brainstate
>>> from tapax.compat import braintrace
>>> gru = braintrace.nn.GRUCell(3, 4)
>>> _ = brainstate.nn.init_all_states(gru)
>>> inputs = brainstate.random.randn(3)
>>> hidden_perturb = braintrace.add_hidden_perturbation_in_module(gru, inputs)
>>> isinstance(hidden_perturb, braintrace.HiddenPerturbation)
True

Attributes and arguments with lists have one entry for each hidden state, in the order in which the
module reads its states. `nn` contains the recurrent cells of brainstate that braintrace has, too;
they compute the same results, but their parameters have no eligibility traces: use
`tapax.hidden.online` to learn online. `perturb_data_to_hidden_group_data` takes the groups that
this module, or braintrace, finds.

It follows braintrace in points in which `tapax.hidden` differs:

- Every hidden state has one perturbation, at its last write. `tapax.hidden` has one for each write.
- Groups without dynamics, whose states depend on old ones through products with matrices alone,
  come last.
- States in different items of a list, `("layers", 0, "h")` and `("layers", 1, "h")`, are never in
  one group, even if one drives the other unit by unit.
- If the results of a while loop reach a hidden state, `stop_gradient` detaches the loop from its
  inputs, with a warning: the loop passes no gradients to anything upstream. `tapax.hidden` leaves
  the loop as it is: forward derivatives pass through it, and JAX raises for reverse ones.

It differs from braintrace where braintrace loses something. Here, two states that are written with
one value have a perturbation each; a write in a jitted function, a long loop or a branch is
perturbed, too; a product with a sparse matrix of brainevent separates two groups; an equation may
read several states; and Jacobians are exact if units interact without a matrix.
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
from tapax.hidden._add_perturbation import perturb_writes
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
    """Add a perturbation to every hidden state of a brainstate module.

    `eval_jaxpr` of the result takes the leaves of `(model_args, model_kwargs)` and then the values
    of all states of the module, in the order in which it reads them; it returns the output and then
    those values. The function warns if it detaches a while loop from its inputs.

    Args:
        model: A brainstate module with initialised states.
        *model_args: An example of the arguments of a call.
        **model_kwargs: An example of the keyword arguments of a call.

    Returns:
        A `HiddenPerturbation`.

    Raises:
        HiddenError: If `model` is not a brainstate module, or has no hidden states.

    Example:
        >>> import brainstate
        >>> from tapax.compat import braintrace
        >>> gru = braintrace.nn.GRUCell(3, 4)
        >>> _ = brainstate.nn.init_all_states(gru)
        >>> braintrace.add_hidden_perturbation_in_module(gru, brainstate.random.randn(3))
        HiddenPerturbation(h: float32[4])
    """
    program = detach_loops(_trace(model, model_args, model_kwargs))
    return perturb_writes(find_named_writes(program, last_only=True), program)


def find_hidden_groups_from_module(
    model: Module, *model_args: Any, include_recurrent_mixing: bool = False, **model_kwargs: Any
) -> tuple[list[HiddenGroup], dict[StatePath, HiddenGroup]]:
    """Find the hidden groups of a brainstate module, and the group of each hidden state.

    Args:
        model: A brainstate module with initialised states.
        *model_args: An example of the arguments of a call.
        include_recurrent_mixing: Whether a product with a matrix also connects two states, and is
            part of the transition.
        **model_kwargs: An example of the keyword arguments of a call.

    Returns:
        The list of `HiddenGroup`s, and a dict from the path of each hidden state to its group.

    Raises:
        HiddenError: If `model` is not a brainstate module, or has no hidden states.

    Example:
        >>> import brainstate
        >>> from tapax.compat import braintrace
        >>> lstm = braintrace.nn.LSTMCell(3, 4)
        >>> _ = brainstate.nn.init_all_states(lstm)
        >>> inputs = brainstate.random.randn(3)
        >>> groups, by_path = braintrace.find_hidden_groups_from_module(lstm, inputs)
        >>> groups, sorted(by_path)
        ([HiddenGroup(0: ('h',), ('c',), units of shape (4,))], [('c',), ('h',)])
    """
    groups = find_groups(_trace(model, model_args, model_kwargs), include_recurrent_mixing)
    return groups, {path: group for group in groups for path in group.hidden_paths}


def _trace(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StatefulProgram:
    program = stateful_program(model, join_inputs(args, kwargs), None)
    if program is None:
        refuse_other(model, "This function takes brainstate modules; tapax.hidden takes others.")
    return program
