"""Hidden states of recurrent models: perturbed, grouped, watched over a whole sequence.

Everything here is for a pure function `step(state, *inputs) -> (state, out)`; `functional` makes
one of a recurrent module of brainstate, Flax, Equinox or Haiku. `tapax.hidden.online` learns with
it.
"""

from tapax.hidden._groups import HiddenGroup, hidden_groups
from tapax.hidden._modules import (
    Functional,
    add_hidden_perturbation_in_module,
    functional,
    hidden_groups_in_module,
)
from tapax.hidden._perturbation import HiddenPerturbation, add_hidden_perturbation
from tapax.hidden._step import HiddenError, HiddenState
from tapax.hidden._unrolled import unrolled

__all__ = [
    "Functional",
    "HiddenError",
    "HiddenGroup",
    "HiddenPerturbation",
    "HiddenState",
    "add_hidden_perturbation",
    "add_hidden_perturbation_in_module",
    "functional",
    "hidden_groups",
    "hidden_groups_in_module",
    "unrolled",
]
