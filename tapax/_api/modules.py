"""`modules`: the path and the class of every module of a model.

>>> import tapax
>>> from flax import nnx
>>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
>>> for path, cls in tapax.modules(model):
...     print(path, cls.__name__)
Sequential Sequential
Sequential/layers/0 Linear
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tapax._api.capture import sites
from tapax._frameworks.interface import Module
from tapax._frameworks.module_tree import in_order
from tapax._frameworks.registry import loaded_adapters
from tapax._results import SiteTable, Tabular

if TYPE_CHECKING:
    from rich.table import Table


class ModuleTable(Tabular, tuple[tuple[str, type], ...]):
    """Paths and classes, in the order of the model; prints as a table."""

    __slots__ = ()

    def _table(self) -> Table:
        from tapax._results.tables import modules_table

        return modules_table(self)


def modules(model: Module, *args: Any, **kwargs: Any) -> ModuleTable:
    """The path and the class of every module of `model`: pairs, of which `dict` makes a dict.

    The paths are those of the sites that `capture` finds. Modules of NNX, Equinox and brainstate
    are objects with attributes, and are listed as they are. The modules in one of Linen come to be
    when it is called, and those of a transformed Haiku function as well: give the arguments that
    you would give to `init`, without the random key. Nothing is computed. A Keras model has paths
    once it is built: give the arguments of a call, which builds it, if it is not.
    """
    for adapter in loaded_adapters():
        maker = adapter.maker(model)
        if maker is not None:
            if not (args or kwargs):
                raise TypeError(
                    f"The modules of a {type(model).__name__} come to be when it is called: give "
                    "`modules` what you would call it with, tapax.modules(model, x)."
                )
            return _made(sites(maker)(*args, **kwargs))
        if adapter.is_module(model):
            return ModuleTable(
                (adapter.path(model, part, path), type(part))
                for path, part in in_order(adapter, model)
                if adapter.has_site(part)
            )
    raise TypeError(
        f"`modules` takes a model of Flax, Equinox, Haiku, brainstate or Keras, but was given "
        f"{model!r} of type {type(model).__name__}. A plain function has sites: "
        "tapax.sites(fn)(*args) lists them."
    )


def _made(table: SiteTable) -> ModuleTable:
    """The modules whose results are sites, each before those in it."""
    found: dict[str, type] = {}
    for site in table:
        if isinstance(site.module, type):
            path = site.path.partition(":")[0]
            path = path if site.method == "__call__" else path.removesuffix(f".{site.method}")
            found.setdefault(path, site.module)

    def prefixes(path: str) -> Iterator[str]:
        return itertools.accumulate(path.split("/"), "{}/{}".format)

    order: dict[str, int] = {}
    for prefix in (prefix for path in found for prefix in prefixes(path)):
        order.setdefault(prefix, len(order))
    ordered = sorted(found, key=lambda path: [order[prefix] for prefix in prefixes(path)])
    return ModuleTable((path, found[path]) for path in ordered)
