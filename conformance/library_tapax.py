"""tapax, in every framework: one call captures the unedited step, with its values and gradients."""

from __future__ import annotations

import importlib

from conformance import framework
from conformance.library import Library
from conformance.problem import Case, Found


class Tapax(Library):
    """tapax with the models of one framework, those of the module `conformance.models_<module>`."""

    modules = ("tapax",)
    together = True

    def __init__(self, name: str, module: str, package: str):
        self.name = name
        self.packages = ("tapax", "jax", package)
        self._models = importlib.import_module(f"conformance.models_{module}").FRAMEWORK

    def missing(self, case: Case, what: str) -> bool:
        return not self._models.has(case)

    def both(self, case: Case) -> tuple[Found, Found]:
        return framework.measure(self._models, case)


def __getattr__(name: str) -> Library:
    columns = {
        "NNX": ("Flax NNX", "nnx", "flax"),
        "LINEN": ("Flax Linen", "linen", "flax"),
        "EQUINOX": ("Equinox", "equinox", "equinox"),
        "HAIKU": ("Haiku", "haiku", "dm-haiku"),
        "BRAINSTATE": ("brainstate", "brainstate", "brainstate"),
        "KERAS": ("Keras", "keras", "keras"),
    }
    if name not in columns:
        raise AttributeError(name)
    return Tapax(*columns[name])
