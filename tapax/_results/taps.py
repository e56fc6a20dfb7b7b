"""`Taps`: the values and gradients that a capture returns.

It prints as a table, shows in a notebook as a tree, and passes through `jit`, `vmap` and `scan` as
any pytree does: its arrays are leaves, its sites are static.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tapax._results.host_arrays import fetch_arrays
from tapax._results.picking import pick_sites
from tapax._results.site_table import SiteTable
from tapax._results.tabular import Tabular
from tapax._sites import Selection, Site, SiteError, nearest

if TYPE_CHECKING:
    from rich.table import Table


class SiteDict(dict[str, Any]):
    """Arrays by the names of their sites, in the order of the program.

    JAX sorts the keys of a dict that passes through `jit`; it leaves these as they are.
    """

    __slots__ = ()

    def __missing__(self, name: Any) -> Any:
        near = f". {nearest(str(name), self)}" if self else ": nothing was captured."
        raise KeyError(f"There is no {name!r} here{near}")


def _flatten(sites: SiteDict) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    return tuple(sites.values()), tuple(sites)


def _flatten_with_keys(sites: SiteDict) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    return [(jax.tree_util.DictKey(name), x) for name, x in sites.items()], tuple(sites)


def _unflatten(names: tuple[str, ...], arrays: Iterable[Any]) -> SiteDict:
    return SiteDict(zip(names, arrays, strict=True)) if names else SiteDict()


jax.tree_util.register_pytree_with_keys(SiteDict, _flatten_with_keys, _unflatten, _flatten)


class Taps(Tabular):
    """The values and gradients that a capture returned, by name.

    `valid[name]` is there for a site that may not have run: a mask for one in a branch or for the
    first iterations of a while loop (`steps=n`), a count of iterations for one in a while loop.
    `sites` says where each comes from.
    """

    # No frozen dataclass: this is made on every call, and its constructor must be fast.
    __slots__ = ("grads", "sites", "valid", "values")

    plotter: ClassVar[Callable[..., Any]]
    """Draws taps. The package sets it, so that results need not import plots."""

    def __init__(self, values: SiteDict, grads: SiteDict, valid: SiteDict, sites: SiteTable):
        self.values = values
        self.grads = grads
        self.valid = valid
        self.sites = sites

    def _table(self) -> Table:
        from tapax._results.tables import taps_table

        return taps_table(self.sites, self.values, self.grads, self.valid)

    def select(self, selection: Selection) -> Taps:
        """Keep the sites that `selection` picks, and drop all others.

        Args:
            selection: a glob such as `"**/mlp"`, a sequence of globs, a predicate on `Site`, or a
                rule such as `tapax.ops("dot_general")`. A glob picks captured operations too.

        Returns:
            Taps with the same arrays, in the same order.

        Raises:
            SiteError: if a part of `selection` matches none of the captured sites.

        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(jnp.tanh(tapax.sow(2 * x, "net/up")), "net/down")
        >>> _, taps = tapax.capture(f)(jnp.ones(3))
        >>> list(taps.select("**/up").values)
        ['net/up']
        """
        captured = self._sites_of(self.values, self.grads, self.valid)
        names = {site.name for site in pick_sites(selection, captured, "select", "this capture")}

        def keep(arrays: SiteDict) -> SiteDict:
            return SiteDict((name, x) for name, x in arrays.items() if name in names)

        sites = SiteTable([site for site in self.sites if site.name in names])
        return Taps(keep(self.values), keep(self.grads), keep(self.valid), sites)

    def stack(self, selection: Selection = "**", of: str = "values") -> Any:
        """Stack the arrays of the sites that `selection` picks along a new first axis.

        Args:
            selection: picks sites, as in `select`.
            of: `"values"`, `"grads"` or `"valid"`: which arrays to stack.

        Returns:
            One array, with the sites in the order of the program: a NumPy array if all of them are,
            else a JAX array. Different dtypes are promoted as by `jnp.stack`.

        Raises:
            SiteError: if `selection` matches nothing, or if the shapes differ.

        >>> import jax.numpy as jnp, tapax
        >>> def f(x):
        ...     for i in range(4):
        ...         x = tapax.sow(jnp.tanh(x), f"net/layers/{i}")
        ...     return x
        >>> _, taps = tapax.capture(f)(jnp.ones(3))
        >>> taps.stack("net/layers/*").shape
        (4, 3)
        """
        if of not in ("values", "grads", "valid"):
            raise ValueError(f"`of` must be 'values', 'grads' or 'valid', but is {of!r}.")
        arrays: SiteDict = getattr(self, of)
        found = pick_sites(selection, self._sites_of(arrays), "stack", f"taps.{of}")
        picked = [site.name for site in found]
        if not picked:
            raise SiteError(f"`stack` was given {selection!r}, which picks nothing in taps.{of}.")
        shapes = {name: arrays[name].shape for name in picked}
        first = picked[0]
        other = next((name for name in picked if shapes[name] != shapes[first]), None)
        if other is not None:
            raise SiteError(
                f"`stack` needs arrays of one shape, but {first!r} has shape {list(shapes[first])} "
                f"and {other!r} has shape {list(shapes[other])}. Select fewer sites."
            )
        on_host = all(isinstance(arrays[name], np.ndarray) for name in picked)
        return (np if on_host else jnp).stack([arrays[name] for name in picked])

    def _sites_of(self, *mappings: SiteDict) -> list[Site]:
        """Return the sites of some arrays, in the order of the arrays."""
        sites = {site.name: site for site in self.sites}
        names = dict.fromkeys(name for arrays in mappings for name in arrays)
        return [sites.get(name, Site(name)) for name in names]

    def to_host(self) -> Taps:
        """Copy all arrays to the host, as NumPy arrays, in one transfer.

        Random keys stay JAX arrays: NumPy has no such type.

        Returns:
            Taps with the same names and sites.

        Raises:
            ValueError: if an array spans several processes, so that this one cannot read it all.
            TypeError: if an array is traced.

        >>> import jax.numpy as jnp, tapax
        >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))
        >>> type(taps.to_host().values["h"]).__name__
        'ndarray'
        """
        return fetch_arrays(self, "copied to the host")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the taps to one safetensors file, which `tapax.open` reads.

        The file holds every array, whatever its type or sharding, and the sites. The class of a
        module is stored as its name, and a reducer without its functions. The file is written under
        another name and then renamed, so that `path` never holds half of it.

        Args:
            path: the file, such as `"step100.safetensors"`; one that exists is replaced.

        Raises:
            OSError: if `path` cannot be written.
            ValueError: if an array spans several processes, so that this one cannot read it all.
            TypeError: if an array is traced.

        >>> import os, tempfile, jax.numpy as jnp, tapax
        >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))
        >>> path = os.path.join(tempfile.mkdtemp(), "taps.safetensors")
        >>> taps.save(path)
        >>> tapax.open(path).values["h"].tolist()
        [2.0, 2.0, 2.0]
        """
        from tapax._results.taps_file import write_taps

        host = fetch_arrays(self, "saved")
        arrays = {"values": host.values, "grads": host.grads, "valid": host.valid}
        write_taps(path, arrays, self.sites)

    def plot(self, at: Selection = "**", stats: str | Sequence[str] | None = None) -> Any:
        """The scale of values and gradients by depth, as a figure: see `tapax.plot.taps`."""
        return type(self).plotter(self, at, stats)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import repr_lib

        return repr_lib.render_object_constructor(
            object_type=type(self),
            attributes={"values": self.values, "grads": self.grads, "valid": self.valid},
            path=path,
            subtree_renderer=subtree_renderer,
            roundtrippable=False,
        )


jax.tree_util.register_dataclass(
    Taps, data_fields=["values", "grads", "valid"], meta_fields=["sites"]
)


def load_taps(path: str | os.PathLike[str]) -> Taps:
    """Read what `Taps.save` wrote, as NumPy arrays."""
    from tapax._results.taps_file import read_taps

    arrays, sites = read_taps(path)
    values, grads, valid = (SiteDict(arrays[kind]) for kind in ("values", "grads", "valid"))
    return Taps(values, grads, valid, SiteTable(sites))
