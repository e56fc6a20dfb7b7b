"""`Activations`: a dataset of activations on disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tapax._results import SiteDict, Tabular
from tapax._sites import nearest
from tapax.data._folder import DatasetFolder, is_dataset
from tapax.data._lazy_array import LazyArray
from tapax.data._manifest import Manifest
from tapax.data._shard_set import ShardSet
from tapax.data._statistics import Statistics
from tapax.data._stored_statistics import read_statistics
from tapax.data._tables import dataset_table

if TYPE_CHECKING:
    from rich.table import Table


class Activations(Tabular):
    """A dataset of activations on disk, as `tapax.harvest` writes it and `tapax.open` reads it.

    `acts["GPT/blocks/3"]` is the array of a site, [rows, width], and `acts["token"]` that of a
    column. Both are read when they are indexed. `acts[5]`, `acts[10:20]` and `acts[[3, 17]]` are
    rows of all of them, as a dict.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._folder = DatasetFolder(path)
        if not is_dataset(path):
            raise FileNotFoundError(f"There is no dataset of activations in {os.fspath(path)!r}.")
        self.manifest = Manifest.read(self._folder.path)
        counts = self._folder.read_index()
        if counts is None:
            units = sorted(self._folder.units_done())
            counts = [self._folder.read_header(unit).rows for unit in units]
            self.is_complete = False
        else:
            units = range(len(counts))
            self.is_complete = True
        self._shards = ShardSet(self._folder, units, counts, self.manifest.hash)
        self._arrays = {a.name: LazyArray(a, self._shards) for a in self.manifest.arrays}

    @property
    def path(self) -> str:
        """The folder of the dataset."""
        return str(self._folder.path)

    @property
    def sites(self) -> list[str]:
        """The names of the sites, those of gradients with `.grad` at the end."""
        return [array.name for array in self.manifest.sites]

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return [array.name for array in self.manifest.columns]

    def __len__(self) -> int:
        return self._shards.rows

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key not in self._arrays:
                raise KeyError(f"The dataset has no {key!r}. {nearest(key, self._arrays)}")
            return self._arrays[key]
        return {name: array[key] for name, array in self._arrays.items()}

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("A dataset is read in batches: `for batch in acts.batches(4096)`.")

    @property
    def nbytes(self) -> int:
        """The size of all rows."""
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def progress(self) -> str:
        """How much of the dataset there is, in words."""
        done, count = len(self._shards.units), self.manifest.unit_plan.count
        return f"{done} units" if count is None else f"{done} of {count} units"

    @functools.cached_property
    def stats(self) -> Mapping[str, Statistics]:
        """The `Statistics` of every site, taken while harvesting and merged over all shards."""
        shards = [self._shards.shard(place) for place in range(len(self._shards.units))]
        return SiteDict((name, read_statistics(name, shards)) for name in self.sites if shards)

    def _table(self) -> Table:
        return dataset_table(self.manifest.arrays, len(self), self.stats, self.progress)
