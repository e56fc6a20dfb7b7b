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

Where it differs from braintrace's, braintrace's loses something: a state that the module writes
several times has a perturbation for every write, and a write in a jitted function, a loop or a
branch is perturbed too; and a product with a sparse matrix of brainevent separates two groups. The
methods `transition` and `diagonal_jacobian` of a group take the state and the inputs of the module.
"""

import types
from typing import Any

import brainstate

from tapax._frameworks.interface import Module
from tapax._frameworks.recurrent_cells import StatePath, join_inputs
from tapax.hidden import HiddenGroup, HiddenPerturbation, add_hidden_perturbation, hidden_groups

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
    those values.
    """
    return add_hidden_perturbation(model, *join_inputs(model_args, model_kwargs))


def find_hidden_groups_from_module(
    model: Module, *model_args: Any, **model_kwargs: Any
) -> tuple[list[HiddenGroup], dict[StatePath, HiddenGroup]]:
    """Finds the hidden groups of a module of brainstate, and the group of each hidden state."""
    groups = hidden_groups(model, *join_inputs(model_args, model_kwargs))
    return groups, {path: group for group in groups for path in group.hidden_paths}
