"""Rows one by one, for the loaders of other libraries: Grain's, and PyTorch's by another module."""

from __future__ import annotations

from typing import Any, Protocol, SupportsIndex


class RowReader(Protocol):
    """A dataset as sources use it: rows by number, and arrays by name."""

    @property
    def path(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: Any) -> Any: ...


class RowSource:
    """A data source of Grain: `len(source)` rows, of which `source[i]` is one.

    It can be pickled: a worker process opens the dataset itself.
    """

    def __init__(self, acts: RowReader, name: str | None):
        self._acts, self._name = acts, name
        if name is not None:
            acts[name]  # raises for a name that the dataset does not have

    def __len__(self) -> int:
        return len(self._acts)

    def __getitem__(self, number: SupportsIndex) -> Any:
        """Return a row: an array, or a dict of all arrays if the source has no name."""
        row = number.__index__()
        return self._acts[row] if self._name is None else self._acts[self._name][row]

    def __repr__(self) -> str:
        return f"RowSource({self._acts.path!r}, {self._name!r})"
