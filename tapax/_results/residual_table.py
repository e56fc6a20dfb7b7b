"""`ResidualTable`: the values that a program keeps for its backward pass, largest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, overload

from tapax._results.residual import Residual, kept_nbytes, policy_nbytes
from tapax._results.tabular import Tabular

if TYPE_CHECKING:
    from rich.table import Table


class ResidualTable(Tabular, Sequence[Residual]):
    """The values that a function computes and keeps for its backward pass, largest first.

    `table.arguments` are the arguments and constants that it keeps besides. `policy` is the name of
    the policy whose effect the table shows.
    """

    def __init__(
        self,
        residuals: Sequence[Residual] = (),
        arguments: Sequence[Residual] = (),
        policy: str | None = None,
    ):
        self._residuals = tuple(sorted(residuals, key=lambda residual: -residual.nbytes))
        self._arguments = tuple(arguments)
        self.policy = policy

    @property
    def arguments(self) -> ResidualTable:
        """The arguments and constants that the backward pass reads: they are in memory anyway."""
        return ResidualTable(self._arguments, (), self.policy)

    @property
    def nbytes(self) -> int:
        """The size of all that the function keeps as it is, on a device."""
        return kept_nbytes(self._residuals)

    @property
    def policy_nbytes(self) -> int | None:
        """The size of all that it keeps on a device under the policy; None without a policy."""
        return None if self.policy is None else policy_nbytes(self._residuals)

    def by_site(self) -> ResidualGroups:
        """The table of each site, module or scope, largest first."""
        return self._group("site", lambda residual: residual.site)

    def by_operation(self) -> ResidualGroups:
        """The table of each operation, largest first."""
        return self._group("operation", lambda residual: residual.operation)

    def by_line(self) -> ResidualGroups:
        """The table of each line of the source, `file:line`, largest first."""
        return self._group("source", lambda residual: residual.source)

    def _group(self, by: str, key: Callable[[Residual], str]) -> ResidualGroups:
        found: dict[str, list[Residual]] = {}
        for residual in self._residuals:
            found.setdefault(key(residual), []).append(residual)
        tables = {name: ResidualTable(part, (), self.policy) for name, part in found.items()}
        return ResidualGroups(by, tables, self.policy)

    @overload
    def __getitem__(self, key: int) -> Residual: ...
    @overload
    def __getitem__(self, key: slice) -> ResidualTable: ...
    def __getitem__(self, key: int | slice) -> Residual | ResidualTable:
        if isinstance(key, slice):
            return ResidualTable(self._residuals[key], (), self.policy)
        return self._residuals[key]

    def __iter__(self) -> Iterator[Residual]:
        return iter(self._residuals)

    def __len__(self) -> int:
        return len(self._residuals)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResidualTable) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self._residuals, self._arguments, self.policy))

    def _table(self) -> Table:
        from tapax._results.tables import residuals_table

        return residuals_table(self._residuals, self._arguments, self.policy)


class ResidualGroups(Tabular, Mapping[str, ResidualTable]):
    """Tables of residuals by site, operation or source line, largest first."""

    def __init__(self, by: str, tables: Mapping[str, ResidualTable], policy: str | None = None):
        self.by = by
        self.policy = policy
        # What the policy alone keeps comes last.
        order = sorted(
            tables, key=lambda name: (-tables[name].nbytes, -(tables[name].policy_nbytes or 0))
        )
        self._tables = {name: tables[name] for name in order}

    def __getitem__(self, key: str) -> ResidualTable:
        return self._tables[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def _table(self) -> Table:
        from tapax._results.tables import residual_groups_table

        return residual_groups_table(self.by, self._tables, self.policy)
