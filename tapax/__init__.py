"""tapax: see, differentiate and change what happens inside any JAX program."""

import importlib
from typing import Any

from tapax import hidden, plot, reduce
from tapax._api.capture import capture, sites
from tapax._api.cut import prefix, suffix
from tapax._api.edit import edit
from tapax._api.gradients import grad, jacobian, value_and_grad
from tapax._api.modules import modules
from tapax._api.perturbations import perturbations, perturbed
from tapax._marks.sow import perturb, scope, sow
from tapax._results.module_table import ModuleTable
from tapax._results.site_table import SiteTable
from tapax._results.taps import Taps
from tapax._sites.errors import SiteError
from tapax._sites.selections import at, lines, named, ops
from tapax._sites.site import Site
from tapax.monitoring import Histogram, Log, Monitor, alert, monitor, open, sink
from tapax.nonfinite import Finding, find_nonfinite

__version__ = "0.2.0"

__all__ = [
    "Finding",
    "Histogram",
    "Log",
    "ModuleTable",
    "Monitor",
    "Site",
    "SiteError",
    "SiteTable",
    "Taps",
    "alert",
    "at",
    "capture",
    "edit",
    "find_nonfinite",
    "grad",
    "hidden",
    "jacobian",
    "lines",
    "modules",
    "monitor",
    "named",
    "open",
    "ops",
    "perturb",
    "perturbations",
    "perturbed",
    "plot",
    "prefix",
    "reduce",
    "scope",
    "sink",
    "sites",
    "sow",
    "suffix",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    # Its layers are modules of Flax, which is imported only where it is used.
    if name == "nn":
        return importlib.import_module("tapax.nn")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


Taps.plotter = plot.taps
