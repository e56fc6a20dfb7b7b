"""`RowSource`: a data source for Grain; and the interface of a dataset that it needs."""

from __future__ import annotations

from typing import Any, Protocol, SupportsIndex


class RowReader(Protocol):
    """The part of a dataset that sources use: rows by number, and arrays by name."""

    @property
    def path(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: Any) -> Any: ...


class RowSource:
    """A data source for Grain, with `len(source)` rows; `source[i]` reads row i.

    `Activations.source` makes it. A pickled source has only the path of the dataset, which a worker
    process opens when it unpickles the source.

    Args:
        acts: The dataset.
        name: The name of a site or a column; None for dicts of all of them.

    Raises:
        KeyError: If the dataset has no site or column of that name.

    Example:
        >>> import pickle, tempfile, jax.numpy as jnp, tapax
        >>> double = lambda x: tapax.sow(2 * x, "h")
        >>> acts = tapax.harvest(double, [jnp.ones((8, 3))], to=tempfile.mkdtemp())
        >>> source = pickle.loads(pickle.dumps(acts.source()))
        >>> len(source), sorted(source[0])
        (8, ['batch', 'example', 'h'])
    """

    def __init__(self, acts: RowReader, name: str | None):
        self._acts, self._name = acts, name
        if name is not None:
            acts[name]  # raises for a name that the dataset does not have

    def __len__(self) -> int:
        return len(self._acts)

    def __getitem__(self, number: SupportsIndex) -> Any:
        """Read a row: an array, or a dict of all arrays if the source has no name."""
        row = number.__index__()
        return self._acts[row] if self._name is None else self._acts[self._name][row]

    def __repr__(self) -> str:
        return f"RowSource({self._acts.path!r}, {self._name!r})"
