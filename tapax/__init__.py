"""tapax: see, differentiate and change what happens inside any JAX program."""

from typing import TYPE_CHECKING

from tapax._lazy import load_lazily
from tapax._marks.sow import perturb, scope, sow
from tapax._sites import Site, SiteError, at, glob, lines, named, ops, without

if TYPE_CHECKING:
    from tapax import attribute, compat, data, hidden, nn, plot, reduce
    from tapax._api.capture import capture, sites
    from tapax._api.cut import prefix, suffix
    from tapax._api.diff import diff
    from tapax._api.edit import edit
    from tapax._api.gradients import grad, jacobian, value_and_grad
    from tapax._api.modules import ModuleTable, modules
    from tapax._api.perturbations import perturbations, perturbed
    from tapax._api.residuals import residuals
    from tapax._open import open
    from tapax._results import Difference, Residual, ResidualTable, SiteDifference, SiteTable, Taps
    from tapax.data import Activations, harvest
    from tapax.monitoring import Histogram, Log, Monitor, Stream, alert, monitor, sink, stream
    from tapax.nonfinite import Finding, find_nonfinite
    from tapax.viewer import Page, view

__version__ = "0.2.0"

__all__ = [
    "Activations",
    "Difference",
    "Finding",
    "Histogram",
    "Log",
    "ModuleTable",
    "Monitor",
    "Page",
    "Residual",
    "ResidualTable",
    "Site",
    "SiteDifference",
    "SiteError",
    "SiteTable",
    "Stream",
    "Taps",
    "alert",
    "at",
    "attribute",
    "capture",
    "compat",
    "data",
    "diff",
    "edit",
    "find_nonfinite",
    "glob",
    "grad",
    "harvest",
    "hidden",
    "jacobian",
    "lines",
    "modules",
    "monitor",
    "named",
    "nn",
    "open",
    "ops",
    "perturb",
    "perturbations",
    "perturbed",
    "plot",
    "prefix",
    "reduce",
    "residuals",
    "scope",
    "sink",
    "sites",
    "sow",
    "stream",
    "suffix",
    "value_and_grad",
    "view",
    "without",
]

# Models import tapax for their marks alone, so everything else is imported when it is first used.
__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {
        "tapax": ("attribute", "compat", "data", "hidden", "nn", "plot", "reduce", "viewer"),
        "tapax._api.capture": ("capture", "sites"),
        "tapax._api.cut": ("prefix", "suffix"),
        "tapax._api.diff": ("diff",),
        "tapax._api.edit": ("edit",),
        "tapax._api.gradients": ("grad", "jacobian", "value_and_grad"),
        "tapax._api.modules": ("ModuleTable", "modules"),
        "tapax._api.perturbations": ("perturbations", "perturbed"),
        "tapax._api.residuals": ("residuals",),
        "tapax._open": ("open",),
        "tapax._results": (
            "Difference",
            "Residual",
            "ResidualTable",
            "SiteDifference",
            "SiteTable",
            "Taps",
        ),
        "tapax.data": ("Activations", "harvest"),
        "tapax.monitoring": (
            "Histogram",
            "Log",
            "Monitor",
            "Stream",
            "alert",
            "monitor",
            "sink",
            "stream",
        ),
        "tapax.nonfinite": ("Finding", "find_nonfinite"),
        "tapax.viewer": ("Page", "view"),
    },
)
