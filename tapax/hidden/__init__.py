"""Hidden states of recurrent models: perturb them, group them, watch them over a whole sequence.

Functions take a step, `step(state, *inputs) -> (state, out)`, or a recurrent module of a supported
framework; `functional` makes a step of such a module. `tapax.hidden.online` learns with steps.
"""

from tapax._frameworks.recurrent_cells import HiddenError
from tapax.hidden._groups import HiddenGroup, hidden_groups
from tapax.hidden._hidden_perturbation import HiddenPerturbation, add_hidden_perturbation
from tapax.hidden._mark_states import mark_states
from tapax.hidden._pure_step import PureStep, functional
from tapax.hidden._step import HiddenState

__all__ = [
    "HiddenError",
    "HiddenGroup",
    "HiddenPerturbation",
    "HiddenState",
    "PureStep",
    "add_hidden_perturbation",
    "functional",
    "hidden_groups",
    "mark_states",
]
