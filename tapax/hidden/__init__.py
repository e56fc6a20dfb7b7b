"""Hidden states of recurrent models: perturb them, group them, capture them over a sequence.

The functions take a step, `step(state, *inputs) -> (state, out)`, or a recurrent module of a
supported framework; `functional` converts such a module to a step. `tapax.hidden.online` learns
online with steps.
"""

from tapax._frameworks.recurrent_cells import HiddenError
from tapax._lazy import load_lazily
from tapax.hidden._add_perturbation import add_hidden_perturbation
from tapax.hidden._groups import HiddenGroup, hidden_groups
from tapax.hidden._hidden_perturbation import HiddenPerturbation
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

__getattr__, __dir__ = load_lazily(__name__, [*__all__, "online"], {__name__: ("online",)})
