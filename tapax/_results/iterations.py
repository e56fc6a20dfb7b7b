"""The parts of a captured array, one for each iteration of the loops around its site.

A site in a scan has an array for each iteration. Plots and the page show these arrays one by one,
each under the name of the site and the iteration: `GPT/blocks/mlp[3]`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.core import Tracer

from tapax._jax import Value, spans_processes
from tapax._results.loop_order import loop_axes
from tapax._sites import Site
from tapax.reduce import Reducer


class Iteration(NamedTuple):
    """The array of a site in one iteration of the loops around it.

    `mask` has the leading axes of `array`, and is True for the elements that were computed.
    """

    name: str
    place: tuple[int, ...]
    array: np.ndarray
    mask: np.ndarray

    @property
    def computed(self) -> np.ndarray:
        """The elements that were computed."""
        return self.array[self.mask]


def split_iterations(
    site: Site, array: Value, valid: Value | None, lead: int, purpose: str
) -> Iterator[Iteration]:
    """Split a captured array by the iterations of the loops around its site.

    `valid` is the entry of the array in `Taps.valid`, and `lead` the number of axes before the axes
    of the site. An error names `purpose`, such as "A plot", as the reader of the numbers.
    """
    if isinstance(array, Tracer):
        raise TypeError(
            f"{purpose} needs numbers, but {site.name!r} is traced: return the taps from the "
            f"function that is under jax.jit, grad, vmap or scan, and {_verb(purpose)} them there."
        )
    if spans_processes(array):
        raise ValueError(
            f"{purpose} needs all of {site.name!r}, but this process has only a part of it. "
            "Every process has the whole of a statistic: capture with values=tapax.reduce.rms."
        )
    array = np.asarray(array)
    mask = np.ones((), bool) if valid is None else np.asarray(valid)
    found = loop_axes(site, array.shape, mask, lead)
    axes = [axis for axis in found if axis is not None]
    mask = mask.astype(bool)
    if mask.shape != array.shape[: mask.ndim]:
        mask = mask.any()
    over = max(mask.ndim, *(axis + 1 for axis in axes), 0)
    mask = np.broadcast_to(mask.reshape(mask.shape + (1,) * (over - mask.ndim)), array.shape[:over])
    array, mask = (np.moveaxis(x, axes, range(len(axes))) for x in (array, mask))
    for place in itertools.product(*(range(n) for n in array.shape[: len(axes)])):
        name = f"{site.name}[{','.join(map(str, place))}]" if place else site.name
        yield Iteration(name, place, array[place], mask[place])


def _verb(purpose: str) -> str:
    return "plot" if purpose == "A plot" else "view"


def split_statistic(site: Site, reducer: Reducer | None) -> tuple[Site, str]:
    """Return the marked site and the statistic, which follows the last colon of several."""
    if reducer is None:
        return site, "rms"
    path, _, leaf = site.path.rpartition(":")
    if path and (leaf == reducer.label or leaf.startswith(f"{reducer.label}.")):
        return dataclasses.replace(site, path=path), "rms" if is_whole(reducer) else leaf
    return site, "rms" if is_whole(reducer) else reducer.label


def is_whole(reducer: Reducer | None) -> bool:
    """Return whether a reducer keeps values unchanged."""
    return reducer is None or reducer.name == "last"


def rms(array: np.ndarray) -> float:
    """Compute the root mean square of numbers of any magnitude and dtype."""
    x = np.abs(array.astype(np.complex128 if np.iscomplexobj(array) else np.float64))
    largest = x.max()
    if not np.isfinite(largest) or not largest:
        return float(largest)
    return float(largest * np.sqrt(np.mean((x / largest) ** 2)))
