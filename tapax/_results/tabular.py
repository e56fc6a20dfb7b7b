"""`Tabular`: a result that prints as a table, as text or in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


class Tabular:
    """A result that prints as a table, and that a notebook shows as a tree of modules."""

    __slots__ = ()

    def _table(self) -> Table:
        raise NotImplementedError

    def __repr__(self) -> str:
        from tapax._results.tables import render

        return render(self._table())

    def _repr_html_(self) -> str:
        from tapax._results.html import to_html

        return to_html(self._table())
