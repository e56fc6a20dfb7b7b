"""jaxtap: see, differentiate and change what happens inside any JAX program."""

from jaxtap import plot, reduce
from jaxtap._capture import capture, sites
from jaxtap._cut import prefix, suffix
from jaxtap._edit import edit
from jaxtap._gradients import grad, jacobian, value_and_grad
from jaxtap._listing import ModuleTable, modules
from jaxtap._mark import perturb, scope, sow
from jaxtap._perturbations import perturbations, perturbed
from jaxtap._sites import Site, SiteError, at, lines, named, ops
from jaxtap._taps import SiteTable, Taps
from jaxtap.nonfinite import Finding, find_nonfinite
from jaxtap.watching import Histogram, Log, Monitor, alert, monitor, open, sink

__version__ = "0.1.0"

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
