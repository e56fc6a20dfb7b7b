"""`Taps`: the values and gradients that a capture returns.

It prints as a table, shows in a notebook as a tree, and passes through `jit`, `vmap` and `scan` as
any pytree does: its arrays are leaves, its sites are static.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from tapax._results.site_table import SiteTable
from tapax._results.tabular import Tabular
from tapax._sites import Selection

if TYPE_CHECKING:
    from rich.table import Table


class SiteDict(dict[str, Any]):
    """Arrays by the names of their sites, in the order of the program.

    JAX sorts the keys of a dict that passes through `jit`; it leaves these as they are.
    """

    __slots__ = ()


def _flatten(sites: SiteDict) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    return tuple(sites.values()), tuple(sites)


def _flatten_with_keys(sites: SiteDict) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    return [(jax.tree_util.DictKey(name), x) for name, x in sites.items()], tuple(sites)


def _unflatten(names: tuple[str, ...], arrays: Iterable[Any]) -> SiteDict:
    return SiteDict(zip(names, arrays, strict=True)) if names else SiteDict()


jax.tree_util.register_pytree_with_keys(SiteDict, _flatten_with_keys, _unflatten, _flatten)


class Taps(Tabular):
    """The values and gradients that a capture returned, by name.

    `valid[name]` is there for a site that may not have run: a mask for one in a branch or for the
    first iterations of a while loop (`steps=n`), a count of iterations for one in a while loop.
    `sites` says where each comes from.
    """

    # No frozen dataclass: this is made on every call, and its constructor must be fast.
    __slots__ = ("grads", "sites", "valid", "values")

    plotter: ClassVar[Callable[..., Any]]
    """Draws taps. The package sets it, so that results need not import plots."""

    def __init__(self, values: SiteDict, grads: SiteDict, valid: SiteDict, sites: SiteTable):
        self.values = values
        self.grads = grads
        self.valid = valid
        self.sites = sites

    def _table(self) -> Table:
        from tapax._results.tables import taps_table

        return taps_table(self.sites, self.values, self.grads, self.valid)

    def plot(self, at: Selection = "**", stats: str | Sequence[str] | None = None) -> Any:
        """The scale of values and gradients by depth, as a figure: see `tapax.plot.taps`."""
        return type(self).plotter(self, at, stats)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import repr_lib

        return repr_lib.render_object_constructor(
            object_type=type(self),
            attributes={"values": self.values, "grads": self.grads, "valid": self.valid},
            path=path,
            subtree_renderer=subtree_renderer,
            roundtrippable=False,
        )


jax.tree_util.register_dataclass(
    Taps, data_fields=["values", "grads", "valid"], meta_fields=["sites"]
)
