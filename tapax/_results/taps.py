"""`Taps`: the values and gradients that a capture returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._lazy import load_later
from tapax._results.flow import LazyFlow
from tapax._results.host_arrays import fetch_arrays
from tapax._results.picking import pick_sites
from tapax._results.site_table import SiteTable, flow_of, lazy_flow_of, make_site_table
from tapax._results.tabular import Tabular
from tapax._sites import Selection, Site, SiteError, nearest

if TYPE_CHECKING:
    from rich.table import Table


class SiteDict(dict[str, Any]):
    """Arrays by the names of their sites, in the order of the program.

    JAX sorts the keys of a plain dict that passes through `jit`; it keeps the order of these.
    """

    __slots__ = ()

    def __missing__(self, name: Any) -> Any:
        near = f". {nearest(str(name), self)}" if self else ", because the capture is empty."
        raise KeyError(f"There is no site {name!r} here{near}")


def _flatten(sites: SiteDict) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    return tuple(sites.values()), tuple(sites)


def _flatten_with_keys(sites: SiteDict) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    return [(jax.tree_util.DictKey(name), x) for name, x in sites.items()], tuple(sites)


def _unflatten(names: tuple[str, ...], arrays: Iterable[Any]) -> SiteDict:
    return SiteDict(zip(names, arrays, strict=True)) if names else SiteDict()


jax.tree_util.register_pytree_with_keys(SiteDict, _flatten_with_keys, _unflatten, _flatten)


class Taps(Tabular):
    """The values and gradients that a capture returns, by name.

    It prints as a table, and a notebook shows it as a tree. It is a pytree whose arrays are leaves
    and whose sites are static, so that it passes through `jit`, `vmap` and `scan`.

    Args:
        values: The captured values, by name, in the order of the program.
        grads: The captured gradients, by name.
        valid: Masks and counts, by name, for sites that may not have run: a mask for a site in a
            branch, or for the first iterations of a while loop (`steps=n`); the count of iterations
            for other sites in a while loop.
        sites: A `SiteTable` with the shape, the loops and the source line of each site.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def f(x):
        ...     positive = lambda x: tapax.sow(jnp.sqrt(x), "root")
        ...     return jax.lax.cond(x > 0, positive, lambda x: x, x)
        >>> out, taps = tapax.capture(f)(2.25)
        >>> float(taps.values["root"]), bool(taps.valid["root"])
        (1.5, True)
        >>> bool(tapax.capture(f)(-1.0)[1].valid["root"])
        False
    """

    # Not a frozen dataclass, because every call makes one, and its constructor must be fast.
    __slots__ = ("grads", "sites", "valid", "values")

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
            selection: A glob such as `"**/mlp"`, a sequence of globs, a predicate on `Site`, or a
                rule such as `tapax.ops("dot_general")`. A glob picks captured operations too.

        Returns:
            Taps with the selected arrays, in the order of the program.

        Raises:
            SiteError: If a part of `selection` matches none of the captured sites.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> f = lambda x: tapax.sow(jnp.tanh(tapax.sow(2 * x, "net/up")), "net/down")
            >>> _, taps = tapax.capture(f)(jnp.array([0.5, -1.0]))
            >>> {name: x.tolist() for name, x in taps.select("**/up").values.items()}
            {'net/up': [1.0, -2.0]}
        """
        captured = self._sites_of(self.values, self.grads, self.valid)
        names = {site.name for site in pick_sites(selection, captured, "select", "this capture")}

        def keep(arrays: SiteDict) -> SiteDict:
            return SiteDict((name, x) for name, x in arrays.items() if name in names)

        kept = [site for site in self.sites if site.name in names]
        sites = make_site_table(kept, lazy_flow_of(self.sites))
        return Taps(keep(self.values), keep(self.grads), keep(self.valid), sites)

    def stack(self, selection: Selection = "**", of: str = "values") -> Any:
        """Stack the arrays of the sites that `selection` picks along a new first axis.

        Args:
            selection: Selects sites, as in `select`.
            of: `"values"`, `"grads"` or `"valid"`: the arrays to stack.

        Returns:
            One array, with the sites in the order of the program: a NumPy array if all of them are
            NumPy arrays, else a JAX array. Different dtypes are promoted as `jnp.stack` does.

        Raises:
            SiteError: If `selection` matches nothing, or if the shapes differ.
            ValueError: If `of` is not one of these three strings.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> def f(x):
            ...     for i in range(4):
            ...         x = tapax.sow(2 * x, f"net/layers/{i}")
            ...     return x
            >>> _, taps = tapax.capture(f)(jnp.array([1.0, 0.5]))
            >>> taps.stack("net/layers/*").tolist()
            [[2.0, 1.0], [4.0, 2.0], [8.0, 4.0], [16.0, 8.0]]
        """
        if of not in ("values", "grads", "valid"):
            raise ValueError(f"`of` must be 'values', 'grads' or 'valid', but is {of!r}.")
        arrays: SiteDict = getattr(self, of)
        found = pick_sites(selection, self._sites_of(arrays), "stack", f"taps.{of}")
        picked = [site.name for site in found]
        if not picked:
            raise SiteError(
                f"`stack` was given {selection!r}, which picks no site in taps.{of}. Print the "
                "taps to see their sites."
            )
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

        Random keys remain JAX arrays, because NumPy has no such type.

        Returns:
            Taps with the same names and sites.

        Raises:
            ValueError: If an array spans several processes, so that this one cannot read it all.
            TypeError: If an array is traced.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.array([0.5, 1.5]))
            >>> taps.to_host().values["h"]
            array([1., 3.], dtype=float32)
        """
        return fetch_arrays(self, "copied to the host")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the taps to one safetensors file, which `tapax.open` reads.

        The file contains every array, of any type and sharding, and the sites. It stores the class
        of a module as its name, and a reducer without its functions. `save` writes the file under
        another name and then renames it, so that `path` never contains half a file.

        Args:
            path: The file, such as `"step100.safetensors"`. `save` replaces an existing file.

        Raises:
            OSError: If `path` cannot be written.
            ValueError: If an array spans several processes, so that this one cannot read it all.
            TypeError: If an array is traced.

        Example:
            >>> import os, tempfile, jax.numpy as jnp, tapax
            >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.array([0.5, 1.5]))
            >>> path = os.path.join(tempfile.mkdtemp(), "taps.safetensors")
            >>> taps.save(path)
            >>> tapax.open(path).values["h"].tolist()
            [1.0, 3.0]
        """
        from tapax._results.taps_file import write_taps

        host = fetch_arrays(self, "saved")
        arrays = {"values": host.values, "grads": host.grads, "valid": host.valid}
        write_taps(path, arrays, self.sites, flow_of(self.sites))

    def plot(self, at: Selection = "**", stats: str | Sequence[str] | None = None) -> Any:
        """Draw the scale of values and gradients by depth, as `tapax.plot.taps` does.

        Args:
            at: Selects the sites to draw, as in `select`.
            stats: The statistics to draw, as in `tapax.plot.taps`.

        Returns:
            A matplotlib figure.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
            SiteError: If `at` selects no captured site.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> def f(x):
            ...     for i in range(4):
            ...         x = tapax.sow(2 * x, f"net/layers/{i}")
            ...     return x
            >>> _, taps = tapax.capture(f)(jnp.array([1.0, 0.5]))
            >>> figure = taps.plot()
            >>> len(figure.axes)
            1
        """
        return load_later("tapax", "plot").taps(self, at, stats)

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
    """Read a file that `Taps.save` wrote, as NumPy arrays."""
    from tapax._results.taps_file import read_taps

    arrays, sites, flow = read_taps(path)
    values, grads, valid = (SiteDict(arrays[kind]) for kind in ("values", "grads", "valid"))
    lazy = None if flow is None else LazyFlow(lambda: flow)
    return Taps(values, grads, valid, make_site_table(sites, lazy))
