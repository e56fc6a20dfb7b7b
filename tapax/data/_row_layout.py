"""The layout of rows: the axes that become rows, and the sites that scanned layers become.

A captured array has the axes of loops and meshes first, then the axes of `vmap`, then the axes of
the value. Each layer of a loop over layers becomes a site, such as `Stack/layers/3`, or the layers
stay an axis of each row, as the axes of other loops do. `rows="tokens"` makes rows of all remaining
axes except the last, and `rows="examples"` of the first.

>>> import jax.numpy as jnp
>>> layout = RowLayout("tokens")
>>> found = layout.split(Site("h"), jnp.zeros((2, 3, 4)))
>>> [(site.name, x.shape) for site, sizes, x in found]
[('h', (6, 4))]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax._jax import Value
from tapax._sites import (
    At,
    Selection,
    Site,
    SiteError,
    StepSlice,
    flatten,
    matches,
    name_layers,
    wrong_type,
)

_LOOPS = ("scan[", "while[")
"""The beginnings of the names of loops that add an axis; other names are axes of meshes."""


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The axes of captured arrays that become rows.

    `rows` is "tokens", "examples", or the numbers of axes of the captured array. `layers` is
    "sites" if every scanned layer becomes a site, or "axis" if the layers stay an axis.
    """

    rows: str | tuple[int, ...]
    layers: str = "sites"

    @classmethod
    def of(cls, rows: Any, layers: Any) -> RowLayout:
        """Check the arguments `rows` and `layers`."""
        if not isinstance(rows, str):
            if not isinstance(rows, Sequence) or not rows or not all(type(a) is int for a in rows):
                raise wrong_type("`rows` takes 'tokens', 'examples', or axes, but is", rows)
            rows = tuple(rows)
        elif rows not in ("tokens", "examples"):
            raise ValueError(
                f"`rows` must be 'tokens', 'examples' or a tuple of axes, not {rows!r}."
            )
        if layers not in ("sites", "axis"):
            raise ValueError(f"`layers` must be 'sites' or 'axis', but is {layers!r}.")
        return cls(rows, layers)

    @property
    def is_transposed(self) -> bool:
        """Return whether the axes of rows may have another order than in the captured array."""
        axes = () if isinstance(self.rows, str) else self.rows
        mixes_ends = any(axis < 0 for axis in axes) and any(axis >= 0 for axis in axes)
        return mixes_ends or list(axes) != sorted(axes)

    def split(self, site: Site, x: Value) -> Iterator[tuple[Site, tuple[int, ...], Value]]:
        """Split a captured array into sites; yield each with the sizes of its row axes.

        The third element is the array of the site, with the rows as its first axis.
        """
        if not isinstance(self.rows, str):
            yield site, *_with_rows_first(x, self._given_axes(site, x.ndim))
            return
        added = [loop for loop in site.loops if "[" in loop]
        for loop in added:
            if not loop.startswith(_LOOPS):
                raise SiteError(
                    f"The {site.described}, is inside a shard_map over {loop}, so tapax cannot "
                    f"tell which of its axes are rows. Name them: its shape is {list(x.shape)}, "
                    f"with the axis of {loop} in front; rows=(0, 1) makes rows of the first two."
                )
        layers = [each for each in site.layers if _axis_of(site, each.loop) is not None]
        if self.layers == "axis" or not layers:
            yield site, *self._rows_of(site, x, len(added))
            return
        for numbers in itertools.product(*(range(each.length) for each in layers)):
            chosen = list(zip(layers, numbers, strict=True))
            index: list[Any] = [slice(None)] * len(added)
            for each, number in chosen:
                axis = _axis_of(site, each.loop)
                assert axis is not None
                index[axis] = number
            path = name_layers(site.path, chosen).path
            one = dataclasses.replace(site, path=path, layers=())
            yield one, *self._rows_of(one, x[tuple(index)], len(added) - len(layers))

    def _rows_of(self, site: Site, x: Value, lead: int) -> tuple[tuple[int, ...], Value]:
        """Make rows of an array whose first `lead` axes are axes of loops."""
        stop = x.ndim - 1 if self.rows == "tokens" else lead + 1
        if not lead < stop <= x.ndim:
            least = 2 if self.rows == "tokens" else 1
            raise SiteError(
                f"The {site.described}, has the shape {list(x.shape[lead:])}, but "
                f"rows={self.rows!r} needs {least} axes at least. Leave it out of the selection, "
                "or give the axes that become rows."
            )
        return _with_rows_first(x, tuple(range(lead, stop)))

    def _given_axes(self, site: Site, ndim: int) -> tuple[int, ...]:
        axes = [axis + ndim * (axis < 0) for axis in self.rows if isinstance(axis, int)]
        if any(not 0 <= axis < ndim for axis in axes) or len(set(axes)) < len(axes):
            raise SiteError(
                f"`rows` is {self.rows}, but the {site.described}, has {ndim} axes: its shape is "
                f"{list(site.shape)}."
            )
        return tuple(axes)


def leave_out_step(site: Site, selection: Selection) -> Site:
    """Remove the axis of the innermost loop from a site if `selection` picks one iteration."""
    steps = [
        part.step
        for part in flatten(selection)
        if isinstance(part, At) and part.step is not None and matches(part, site)
    ]
    looped = [i for i, loop in enumerate(site.loops) if loop.startswith(_LOOPS)]
    if not looped or all(isinstance(step, StepSlice) for step in steps):
        return site
    loops = list(site.loops)
    loops[looped[-1]] = loops[looped[-1]].partition("[")[0]
    return dataclasses.replace(site, loops=tuple(loops))


def _axis_of(site: Site, loop: int) -> int | None:
    """Return the axis that a loop added, or None; `loop` counts from the innermost loop."""
    name = site.loops[-1 - loop] if loop < len(site.loops) else ""
    if "[" not in name:
        return None
    return sum("[" in other for other in site.loops[: len(site.loops) - 1 - loop])


def _with_rows_first(x: Value, axes: tuple[int, ...]) -> tuple[tuple[int, ...], Value]:
    sizes = tuple(x.shape[axis] for axis in axes)
    # The compiler would fuse the reshape with the operation before it, and change its last bits.
    x = jax.lax.optimization_barrier(x)
    x = jnp.moveaxis(x, axes, range(len(axes)))
    return sizes, x.reshape(math.prod(sizes), *x.shape[len(axes) :])


def check_same_rows(sizes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sizes of the row axes, or raise if they differ between sites."""
    (first, shared), *others = sizes.items()
    for name, other in others:
        if other != shared:
            raise SiteError(
                f"Every site of a dataset needs the same rows, but {first!r} has rows of the axes "
                f"{list(shared)} and {name!r} of {list(other)}. Harvest them into two datasets, or "
                "give `rows` axes that both have, such as rows='examples'."
            )
    return shared
