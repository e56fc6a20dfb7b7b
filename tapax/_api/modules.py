"""`modules`: list the path and the class of every module of a model."""

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
    """A tuple of the paths and classes of modules, in the order of the model.

    It prints as a table, and `dict(table)` makes a dict. `tapax.modules` returns it.

    Example:
        >>> import tapax
        >>> from flax import nnx
        >>> table = tapax.modules(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> dict(table)["Linear"].__name__
        'Linear'
        >>> print(table)
               1 modules
        ┏━━━━━━━━┳━━━━━━━━━━━━━┓
        ┃ module ┃ class       ┃
        ┡━━━━━━━━╇━━━━━━━━━━━━━┩
        │ Linear │ flax.Linear │
        └────────┴─────────────┘
    """

    __slots__ = ()

    def _table(self) -> Table:
        from tapax._results.tables import modules_table

        return modules_table(self)


def modules(model: Module, *args: Any, **kwargs: Any) -> ModuleTable:
    """List the path and the class of every module of a model. It computes nothing.

    The paths are the names of the sites that `tapax.capture` finds. The modules of NNX, Equinox and
    brainstate are objects with attributes, and need no arguments. A Linen module and a transformed
    Haiku function create their modules when they are called: pass the arguments of `init`, without
    the random key. A Keras model has paths once it is built: pass the arguments of a call to build
    it.

    Args:
        model: A model of Flax, Equinox, Haiku, brainstate or Keras.
        *args: The arguments of a call, for a model of Linen, Haiku or Keras.
        **kwargs: The keyword arguments of that call.

    Returns:
        A `ModuleTable`, a tuple of pairs `(path, class)`.

    Raises:
        TypeError: If `model` is not a model of a supported framework, or if it needs the arguments
            of a call and has none.

    Example:
        >>> import tapax
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
        >>> for path, cls in tapax.modules(model):
        ...     print(path, cls.__name__)
        Sequential Sequential
        Sequential/layers/0 Linear
    """
    for adapter in loaded_adapters():
        maker = adapter.maker(model)
        if maker is not None:
            if not (args or kwargs):
                raise TypeError(
                    f"A {type(model).__name__} creates its modules when it is called, so `modules` "
                    "needs the arguments of a call: tapax.modules(model, x)."
                )
            return _list_called(sites(maker)(*args, **kwargs))
        if adapter.is_module(model):
            return ModuleTable(
                (adapter.path(model, part, path), type(part))
                for path, part in in_order(adapter, model)
                if adapter.has_site(part)
            )
    raise TypeError(
        f"`modules` takes a model of Flax, Equinox, Haiku, brainstate or Keras, but was given "
        f"{model!r} of type {type(model).__name__}. To list the sites of a plain function, use "
        "tapax.sites(fn)(*args)."
    )


def _list_called(table: SiteTable) -> ModuleTable:
    """List the modules whose results are sites, each before the modules inside it."""
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
