"""Drop-in replacements: the names, argument orders and results of other libraries, with tapax.

====================  ============================================================================
module                replaces
====================  ============================================================================
`compat.nnx`          `flax.nnx`: tapax implements `capture`; all other names are those of Flax
`compat.linen`        `flax.linen`: tapax implements `apply`, with intermediates and perturbations
`compat.oryx`         `oryx.core.interpreters.harvest`: sow, reap, plant, harvest, nest
`compat.braintrace`   `braintrace.HiddenPerturbation`, with the functions and cells that it needs
====================  ============================================================================

The first use of a module imports it, and its framework.
"""

from typing import TYPE_CHECKING

from tapax._lazy import load_lazily

if TYPE_CHECKING:
    from tapax.compat import braintrace, linen, nnx, oryx

__all__ = ["braintrace", "linen", "nnx", "oryx"]

__getattr__, __dir__ = load_lazily(__name__, __all__, {__name__: __all__})
