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

    The functions that `tapax.residuals` makes return it. It is a sequence of `Residual`s, and
    prints as a table.

    Args:
        residuals: The values that the function computes.
        arguments: The arguments and constants that the backward pass reads.
        policy: The name of the policy whose effect the table shows; None without a policy.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def loss(w, x):
        ...     return jnp.sum(tapax.sow(jnp.exp(x @ w), "h") ** 3)
        >>> dots = jax.checkpoint_policies.dots_saveable
        >>> table = tapax.residuals(loss, policy=dots)(jnp.ones((3, 2)), jnp.ones((8, 3)))
        >>> [residual.operation for residual in table]
        ['exp', 'mul', 'dot_general']
        >>> table.nbytes, table.policy_nbytes, table.policy
        (128, 64, 'dots_saveable')
        >>> [residual.site for residual in table.arguments]
        ['x', 'w']
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
        """The arguments and constants that the backward pass reads, which are in memory anyway."""
        return ResidualTable(self._arguments, (), self.policy)

    @property
    def nbytes(self) -> int:
        """The size in bytes of all values kept on a device if there were no policy."""
        return kept_nbytes(self._residuals)

    @property
    def policy_nbytes(self) -> int | None:
        """The size in bytes of all values kept on a device with the policy; None without one."""
        return None if self.policy is None else policy_nbytes(self._residuals)

    def by_site(self) -> ResidualGroups:
        """Group the residuals by site, module or scope.

        Returns:
            A mapping from names to tables, largest first. It prints as a table.

        Example:
            >>> import jax, jax.numpy as jnp, tapax
            >>> def loss(x):
            ...     return jnp.sum(jnp.cos(tapax.sow(jnp.exp(x), "h")))
            >>> groups = tapax.residuals(loss)(jnp.ones(16)).by_site()
            >>> {name: table.nbytes for name, table in groups.items()}
            {'h': 64, '': 64}
        """
        return self._group("site", lambda residual: residual.site)

    def by_operation(self) -> ResidualGroups:
        """Group the residuals by operation.

        Returns:
            A mapping from names of primitives to tables, largest first. It prints as a table.

        Example:
            >>> import jax, jax.numpy as jnp, tapax
            >>> loss = lambda x: jnp.sum(jnp.sin(jnp.sin(x)))
            >>> groups = tapax.residuals(loss)(jnp.ones(16)).by_operation()
            >>> {name: len(table) for name, table in groups.items()}
            {'cos': 2}
        """
        return self._group("operation", lambda residual: residual.operation)

    def by_line(self) -> ResidualGroups:
        """Group the residuals by the source line that computes them.

        Returns:
            A mapping from lines, `file:line`, to tables, largest first. It prints as a table.

        Example:
            >>> import jax, jax.numpy as jnp, tapax
            >>> loss = lambda x: jnp.sum(jnp.sin(jnp.sin(x)))
            >>> groups = tapax.residuals(loss)(jnp.ones(16)).by_line()
            >>> [(len(table), table.nbytes) for table in groups.values()]
            [(2, 128)]
        """
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
    """Tables of residuals by site, operation or source line, largest first.

    The methods of `ResidualTable` return it. It is a mapping, and prints as a table.
    """

    def __init__(self, by: str, tables: Mapping[str, ResidualTable], policy: str | None = None):
        self.by = by
        self.policy = policy
        # Values that only the policy keeps come last.
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
