"""Drop-ins: other libraries' names, argument orders and results, on top of tapax.

==================  ============================================================================
module              stands in for
==================  ============================================================================
`compat.nnx`        `flax.nnx`: `capture` is ours, all other names are Flax's
`compat.linen`      `flax.linen`: `apply` is ours, with its intermediates and perturbations
`compat.oryx`       `oryx.core.interpreters.harvest`: sow, reap, plant, harvest, nest
`compat.braintrace` `braintrace.HiddenPerturbation`, and the functions and cells it is used with
==================  ============================================================================

Each is imported when it is first used, and its framework with it.
"""

from typing import TYPE_CHECKING

from tapax._lazy import load_lazily

if TYPE_CHECKING:
    from tapax.compat import braintrace, linen, nnx, oryx

__all__ = ["braintrace", "linen", "nnx", "oryx"]

__getattr__, __dir__ = load_lazily(__name__, __all__, {__name__: __all__})
