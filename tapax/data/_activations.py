"""`Activations`: a dataset of activations on disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh, Sharding

from tapax._results import SiteDict, Tabular
from tapax._results.picking import pick_sites
from tapax._sites import Site, nearest
from tapax.data._arguments import as_integer
from tapax.data._batch_order import WINDOW, BatchOrder
from tapax.data._batch_reader import Batches, check_divisible, make_sharding
from tapax.data._export import export_dataset
from tapax.data._folder import DatasetFolder, is_dataset
from tapax.data._lazy_array import LazyArray
from tapax.data._manifest import Manifest
from tapax.data._row_source import RowSource
from tapax.data._shard_set import ShardSet
from tapax.data._statistics import Statistics
from tapax.data._stored_statistics import read_statistics
from tapax.data._tables import dataset_table
from tapax.data._verify import Verification, verify_dataset

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
        done, count = len(self._shards.units), self.manifest.unit_plan.shard_count
        return f"{done} units" if count is None else f"{done} of {count} units"

    @functools.cached_property
    def stats(self) -> Mapping[str, Statistics]:
        """The `Statistics` of every site, taken while harvesting and merged over all shards."""
        shards = [self._shards.shard(place) for place in range(len(self._shards.units))]
        return SiteDict((name, read_statistics(name, shards)) for name in self.sites if shards)

    def batches(
        self,
        size: int,
        *,
        seed: int | None = None,
        sites: Any = None,
        start: int = 0,
        mesh: Mesh | None = None,
        sharding: Sharding | None = None,
        window: int = WINDOW,
        drop_remainder: bool = False,
    ) -> Batches:
        """Iterate over the dataset in batches that are on the device, read ahead by threads.

        Args:
            size: how many rows a batch has.
            seed: decides the order, which is the same on every machine; None for the order of the
                dataset. Shards are shuffled, then the rows of `window` shards at a time. The rows
                of one batch are in the order of the dataset.
            sites: selects sites and columns by name or glob; all if None.
            start: the number of the first batch, to go on where another reader stopped.
            mesh: divides the rows of each batch over all devices of a mesh.
            sharding: divides batches in another way.
            window: how many shards have their rows mixed.
            drop_remainder: whether to leave out the last batch if it has fewer rows.

        Returns:
            An iterator over dicts of arrays by name. Its `position` is the next batch, its length
            the number of batches.

        >>> import tempfile, jax.numpy as jnp, tapax
        >>> double = lambda x: tapax.sow(2 * x, "h")
        >>> acts = tapax.harvest(double, [jnp.ones((8, 3))], to=tempfile.mkdtemp())
        >>> [batch["h"].shape for batch in acts.batches(5, seed=0, sites="h")]
        [(5, 3), (3, 3)]
        """
        size, start = as_integer("size", size, 1), as_integer("start", start, 0)
        window = as_integer("window", window, 1)
        seed = None if seed is None else as_integer("seed", seed)
        placed = make_sharding(mesh, sharding)
        check_divisible(placed, size, len(self), drop_remainder)
        order = BatchOrder(self._shards.counts.tolist(), size, seed, window, drop_remainder)
        return Batches(self._select(sites), order, start, placed)

    def source(self, site: str | None = None) -> RowSource:
        """Make a data source for Grain: rows of one site or column, or dicts of all of them."""
        return RowSource(self, site)

    def torch(self, sites: Any = None) -> Any:
        """Make a `torch.utils.data.Dataset` of rows as dicts of tensors.

        Args:
            sites: selects sites and columns by name or glob; all if None.

        Raises:
            ModuleNotFoundError: if PyTorch is not installed.
        """
        from tapax.data._torch_dataset import TorchDataset

        return TorchDataset(self, list(self._select(sites)))

    def export(self, path: str | os.PathLike[str], sites: Any = None) -> None:
        """Write the dataset in another format, piece by piece, whole or not at all.

        Args:
            path: a new file or folder, whose name ends in `.parquet`, `.arrow` or `.lance`.
            sites: selects sites and columns by name or glob; all if None.

        Raises:
            ImportError: if pyarrow, or lance, is not installed; the message says how to.
            FileExistsError: if there is something at `path`.
        """
        export_dataset(self._select(sites), path)

    def verify(self) -> Verification:
        """Read every byte of the dataset, and compare it with its checksum.

        Returns:
            A `Verification`, whose `faults` name every shard that is not whole.
        """
        return verify_dataset(self.path)

    def _select(self, selection: Any) -> dict[str, LazyArray]:
        if selection is None:
            return self._arrays
        sites = [Site(name) for name in self._arrays]
        picked = pick_sites(selection, sites, "sites", "this dataset")
        return {site.name: self._arrays[site.name] for site in picked}

    def __reduce__(self) -> Any:
        return Activations, (self.path,)

    def _table(self) -> Table:
        return dataset_table(self.manifest.arrays, len(self), self.stats, self.progress)
