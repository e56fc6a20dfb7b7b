"""`SiteTable`: the sites of a program, in its order."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from tapax._results.flow import Flow, LazyFlow
from tapax._results.tabular import Tabular
from tapax._sites import Site, nearest

if TYPE_CHECKING:
    from rich.table import Table


class SiteTable(Tabular, Sequence[Site]):
    """A table of the sites of a program, in the order of the program.

    The functions that `tapax.sites` makes return it, and `Taps.sites` is one. It is a sequence of
    `Site`s, and prints as a table. `table["net/h"]` finds a site by name, and raises `KeyError`
    with the nearest names if there is no such site.

    Args:
        sites: The `Site`s, in the order of the program.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(jnp.tanh(tapax.sow(2 * x, "up")), "down")
        >>> table = tapax.sites(f)(jnp.ones((4, 8)))
        >>> table.names, table.nbytes
        (['up', 'down'], 256)
        >>> table["up"].shape
        (4, 8)
    """

    def __init__(self, sites: Sequence[Site] = ()):
        self._sites = tuple(sites)
        self._flow: LazyFlow | None = None
        self._hash = hash(self._sites)

    @property
    def names(self) -> list[str]:
        """The names of the sites, each once."""
        return list(dict.fromkeys(s.name for s in self._sites))

    @property
    def nbytes(self) -> int:
        """The size in bytes of all arrays that a capture of these sites returns."""
        return sum(s.nbytes for s in self._sites)

    @overload
    def __getitem__(self, key: int | str) -> Site: ...
    @overload
    def __getitem__(self, key: slice) -> SiteTable: ...
    def __getitem__(self, key: int | str | slice) -> Site | SiteTable:
        if isinstance(key, slice):
            return make_site_table(self._sites[key], self._flow)
        if not isinstance(key, str):
            return self._sites[operator.index(key)]
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

    def __reduce__(self) -> Any:
        # The flow contains the program, which cannot be stored; hashes differ between processes.
        return SiteTable, (self._sites,)

    def _table(self) -> Table:
        from tapax._results.tables import sites_table

        return sites_table(self)


def make_site_table(sites: Sequence[Site], flow: LazyFlow | None) -> SiteTable:
    """Make a table of some sites of a program with the flow of data of the whole program."""
    table = SiteTable(sites)
    table._flow = flow
    return table


def lazy_flow_of(sites: SiteTable) -> LazyFlow | None:
    """Return the flow of data of the program that has the sites, which is not found yet."""
    return sites._flow


def flow_of(sites: SiteTable) -> Flow | None:
    """Find the flow of data of the program that has the sites; None if the program is unknown."""
    return None if sites._flow is None else sites._flow.get()
