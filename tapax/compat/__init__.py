"""Drop-ins: other libraries' names, argument orders and results, on top of tapax.

==================  ============================================================================
module              stands in for
==================  ============================================================================
`compat.nnx`        `flax.nnx.capture`
`compat.linen`      `flax.linen.Module.apply` with its intermediates and perturbations
`compat.oryx`       `oryx.core.interpreters.harvest`: sow, reap, plant, harvest, nest
`compat.braintrace` `braintrace.HiddenPerturbation`, and the functions and cells it is used with
==================  ============================================================================

Each is imported when it is first used, and its framework with it.
"""

import importlib
from typing import Any

_MODULES = ("braintrace", "linen", "nnx", "oryx")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(_MODULES)
