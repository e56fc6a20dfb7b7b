"""What comes back: `Taps`, a pytree of flat dicts, and `SiteTable`, a table of sites.

Both print as tables. `Taps` passes through `jit`, `vmap` and `scan` as any pytree does: its arrays
are leaves, its sites are static.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import jax

from tapax._sites.errors import nearest
from tapax._sites.selections import Selection
from tapax._sites.site import Site


class SiteTable(Sequence[Site]):
    """Sites in the order of the program; `table["net/h"]` finds one by name."""

    def __init__(self, sites: Sequence[Site] = ()):
        self._sites = tuple(sites)
        self._hash = hash(self._sites)

    @property
    def names(self) -> list[str]:
        """The names of the sites, each once."""
        return list(dict.fromkeys(s.name for s in self._sites))

    @property
    def nbytes(self) -> int:
        """The size of everything that a capture of these sites returns."""
        return sum(s.nbytes for s in self._sites)

    @overload
    def __getitem__(self, key: int | str) -> Site: ...
    @overload
    def __getitem__(self, key: slice) -> SiteTable: ...
    def __getitem__(self, key: int | str | slice) -> Site | SiteTable:
        if isinstance(key, slice):
            return SiteTable(self._sites[key])
        if isinstance(key, int):
            return self._sites[key]
        for site in self._sites:
            if site.name == key:
                return site
        raise KeyError(f"There is no site {key!r}. {nearest(key, self.names)}")

    def __contains__(self, key: object) -> bool:
        return key in self._sites or any(s.name == key for s in self._sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SiteTable) and self._sites == other._sites

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        from tapax._show import sites_table

        return sites_table(self)


class Taps:
    """The values and gradients that a capture returned, by name.

    `valid[name]` is there for a site that may not have run: a mask for one in a branch or for the
    first iterations of a while loop (`steps=n`), a count of iterations for one in a while loop.
    `sites` says where each comes from.
    """

    # No frozen dataclass: this is made on every call, and its constructor must be fast.
    __slots__ = ("grads", "sites", "valid", "values")

    def __init__(
        self,
        values: dict[str, Any],
        grads: dict[str, Any],
        valid: dict[str, Any],
        sites: SiteTable,
    ):
        self.values = values
        self.grads = grads
        self.valid = valid
        self.sites = sites

    def __repr__(self) -> str:
        from tapax._show import taps_table

        return taps_table(self)

    def plot(self, at: Selection = "**", stats: str | Sequence[str] | None = None) -> Any:
        """The scale of values and gradients by depth, as a figure: see `tapax.plot.taps`."""
        from tapax import plot

        return plot.taps(self, at, stats)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import repr_lib

        return repr_lib.render_object_constructor(
            object_type=type(self),
            attributes={"values": self.values, "grads": self.grads, "valid": self.valid},
            path=path,
            subtree_renderer=subtree_renderer,
            roundtrippable=False,
        )


def _flatten(taps: Taps) -> tuple[Any, SiteTable]:
    return (taps.values, taps.grads, taps.valid), taps.sites


def _flatten_with_keys(taps: Taps) -> tuple[Any, SiteTable]:
    key = jax.tree_util.GetAttrKey
    return (
        (key("values"), taps.values),
        (key("grads"), taps.grads),
        (key("valid"), taps.valid),
    ), taps.sites


def _unflatten(sites: SiteTable, children: Any) -> Taps:
    values, grads, valid = children
    return Taps(values, grads, valid, sites)


jax.tree_util.register_pytree_with_keys(Taps, _flatten_with_keys, _unflatten, _flatten)
