"""`Activations`: a dataset of activations on disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh, Sharding

from tapax._results import SiteDict, Tabular
from tapax._results.picking import pick_sites
from tapax._sites import Site, SiteError, nearest
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

    `acts["GPT/blocks/3"]` is the array of a site, [rows, width], and `acts["token"]` is the array
    of a column. Both are `LazyArray`s: indexing them reads from disk. `acts[5]`, `acts[10:20]` and
    `acts[[3, 17]]` read rows of all sites and columns, as a dict of arrays by name.

    `len(acts)` is the number of rows, and `acts.is_complete` says whether every unit is done. If
    the harvest has not finished, the dataset has the rows of the units that are done so far.

    Args:
        path: The folder of the dataset.

    Raises:
        FileNotFoundError: If `path` does not contain a dataset.
        ValueError: If the manifest or the index of the dataset was altered.

    Example:
        >>> import tempfile, jax.numpy as jnp, tapax
        >>> double = lambda x: tapax.sow(2 * x, "h")
        >>> folder = tempfile.mkdtemp()
        >>> _ = tapax.harvest(double, [jnp.ones((8, 3))], to=folder)
        >>> acts = tapax.Activations(folder)
        >>> acts.path == folder, len(acts), acts.sites, acts.columns
        (True, 8, ['h'], ['batch', 'example'])
        >>> acts["h"][:2].tolist(), acts[5]["example"].item()
        ([[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]], 5)
        >>> acts.nbytes, acts.progress, acts.stats["h"].mean.tolist()
        (192, '1 of 1 units', [2.0, 2.0, 2.0])
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._folder = DatasetFolder(path)
        if not is_dataset(path):
            raise FileNotFoundError(f"There is no dataset of activations in {os.fspath(path)!r}.")
        self.manifest = Manifest.read(self._folder.path)
        counts = self._folder.read_index(self.manifest.unit_plan.shard_count)
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
        """The names of the sites; the name of a gradient ends in `.grad`."""
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
        """The size of all rows, in bytes."""
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def progress(self) -> str:
        """The number of units that are done, in words: `"3 of 8 units"`."""
        done, count = len(self._shards.units), self.manifest.unit_plan.shard_count
        return f"{done} units" if count is None else f"{done} of {count} units"

    @functools.cached_property
    def stats(self) -> Mapping[str, Statistics]:
        """The `Statistics` of every site, which `harvest` measured, merged over all shards."""
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
        """Iterate over the dataset in batches on the device; threads read batches ahead.

        Args:
            size: The number of rows in a batch.
            seed: An integer that decides the order of the rows, alike on every machine: it shuffles
                the shards, then the rows of `window` shards at a time. The rows within one batch
                stay in the order of the dataset. If None, all rows come in that order.
            sites: Selects sites and columns by name or glob; all of them if None.
            start: The number of the first batch, to continue where another reader stopped.
            mesh: A mesh; the rows of each batch are divided over all of its devices.
            sharding: The sharding of each array in a batch, instead of `mesh`.
            window: The number of shards whose rows `seed` mixes at a time.
            drop_remainder: Whether to omit the last batch if it has fewer rows than `size`.

        Returns:
            A `Batches`, an iterator over dicts of JAX arrays by name. Its `position` is the number
            of the next batch, its length the number of all batches.

        Raises:
            TypeError: If an argument has the wrong type, or a number is too small.
            ValueError: If both `mesh` and `sharding` are given, or a batch cannot be divided over
                the devices; if `start` is beyond the last batch, or `drop_remainder` leaves none.
            SiteError: If `sites` selects nothing.
            ShardError: While iterating: if a shard is missing or was altered.
            OverflowError: While iterating: if a number needs 64 bits, but JAX has 32.

        Example:
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
        arrays = self._select(sites)
        check_divisible(placed, size, arrays, drop_remainder)
        order = BatchOrder(self._shards.counts.tolist(), size, seed, window, drop_remainder)
        if start > len(order):
            raise ValueError(
                f"`start` is {start}, but the dataset has {len(order)} batches of {size} rows. A "
                "position belongs to the size, and to `drop_remainder`, of the batches it counts."
            )
        if len(self) and not len(order):
            raise ValueError(
                f"drop_remainder=True leaves no batch: the dataset has {len(self)} rows, and a "
                f"batch {size}. Choose another `size`."
            )
        return Batches(arrays, order, start, placed)

    def source(self, site: str | None = None) -> RowSource:
        """Make a data source of rows for Grain.

        Args:
            site: The name of a site or a column, whose rows the source returns as arrays. If None,
                a row is a dict of the arrays of all sites and columns.

        Returns:
            A `RowSource`, which worker processes can unpickle.

        Raises:
            KeyError: If the dataset has no site or column of that name.

        Example:
            >>> import tempfile, jax.numpy as jnp, tapax
            >>> double = lambda x: tapax.sow(2 * x, "h")
            >>> acts = tapax.harvest(double, [jnp.ones((8, 3))], to=tempfile.mkdtemp())
            >>> source = acts.source("h")
            >>> len(source), source[2].tolist()
            (8, [2.0, 2.0, 2.0])
        """
        return RowSource(self, site)

    def torch(self, sites: Any = None) -> Any:
        """Make a `torch.utils.data.Dataset` whose rows are dicts of tensors.

        Args:
            sites: Selects sites and columns by name or glob; all of them if None.

        Returns:
            A `torch.utils.data.Dataset`. It reads a whole batch at once for a `DataLoader`.

        Raises:
            ModuleNotFoundError: If PyTorch is not installed.
            SiteError: If `sites` selects nothing.

        Example:
            >>> import importlib.util, tempfile, jax.numpy as jnp, tapax
            >>> double = lambda x: tapax.sow(2 * x, "h")
            >>> acts = tapax.harvest(double, [jnp.ones((8, 3))], to=tempfile.mkdtemp())
            >>> if importlib.util.find_spec("torch"):
            ...     assert acts.torch(sites="h")[2]["h"].tolist() == [2.0, 2.0, 2.0]
        """
        from tapax.data._torch_dataset import TorchDataset

        return TorchDataset(self, list(self._select(sites)))

    def export(self, path: str | os.PathLike[str], sites: Any = None) -> None:
        """Write the dataset to a Parquet, Arrow or Lance file.

        The rows are written piece by piece, so that they need not fit in memory. `path` appears
        once all of them are written.

        Args:
            path: A new file or folder, whose name ends in `.parquet`, `.arrow` or `.lance`.
            sites: Selects sites and columns by name or glob; all of them if None.

        Raises:
            ImportError: If pyarrow or lance is not installed; the message says how to install it.
            FileExistsError: If `path` exists.
            OSError: If `path` cannot be written.
            ValueError: If `path` has another ending, or the rows of a site have no elements.
            SiteError: If `sites` selects nothing.

        Example:
            >>> import importlib.util, os, tempfile, jax.numpy as jnp, tapax
            >>> double = lambda x: tapax.sow(2 * x, "h")
            >>> acts = tapax.harvest(double, [jnp.ones((8, 3))], to=tempfile.mkdtemp())
            >>> path = os.path.join(tempfile.mkdtemp(), "h.parquet")
            >>> if importlib.util.find_spec("pyarrow"):
            ...     acts.export(path, sites="h")
        """
        export_dataset(self._select(sites), path)

    def verify(self) -> Verification:
        """Read every byte of the dataset and compare it with the checksums.

        Returns:
            A `Verification`, whose `faults` name every shard that is missing or was altered.

        Example:
            >>> import tempfile, jax.numpy as jnp, tapax
            >>> double = lambda x: tapax.sow(2 * x, "h")
            >>> acts = tapax.harvest(double, [jnp.ones((8, 3))], to=tempfile.mkdtemp())
            >>> acts.verify().is_whole
            True
        """
        return verify_dataset(self.path)

    def _select(self, selection: Any) -> dict[str, LazyArray]:
        if selection is None:
            return self._arrays
        sites = [Site(name) for name in self._arrays]
        picked = pick_sites(selection, sites, "sites", "this dataset")
        if not picked:
            raise SiteError(
                f"sites={selection!r} selects nothing. Leave `sites` out to select all."
            )
        return {site.name: self._arrays[site.name] for site in picked}

    def __reduce__(self) -> Any:
        # A worker process may have another current folder.
        return Activations, (os.path.abspath(self.path),)

    def _table(self) -> Table:
        return dataset_table(self.manifest.arrays, len(self), self.stats, self.progress)
