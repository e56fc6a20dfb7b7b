"""Loops around sites: the axes of their iterations, and the order in which sites run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tapax._sites import Site


def loop_axes(
    site: Site, shape: Sequence[int], valid: np.ndarray | None, lead: int = 0
) -> tuple[int | None, ...]:
    """Find the axis of the iterations of each loop of a site; None if the array has no such axis.

    The first `lead` axes come from a transformation of the capture. The axes of a mesh are not
    iterations. If the length of an axis differs from that of its loop, the capture selected some
    iterations, and the array does not say which: that loop and the loops inside it have no axis.
    """
    axes: list[int | None] = [None] * len(site.loops)
    axis = lead
    for i, loop in enumerate(site.loops):
        size = re.fullmatch(r"(.*)\[(\d+)\]", loop)
        if size is None:  # a while loop has an axis if its first iterations were captured
            mask = valid is not None and valid.dtype == bool and valid.shape[axis : axis + 1]
            if not mask or mask != tuple(shape[axis : axis + 1]):
                continue
        elif tuple(shape[axis : axis + 1]) != (int(size[2]),):
            break
        if size is None or size[1] == "scan":
            axes[i] = axis
        axis += 1
    return tuple(axes)


class Occurrence(NamedTuple):
    """An event at a site: the loops around it, and the first iteration of each with the event.

    `iterations` is None if the event did not happen, and contains None for a loop whose iteration
    is not known.
    """

    item: Any
    loops: tuple[str, ...]
    iterations: tuple[int | None, ...] | None


def find_first(found: Sequence[Occurrence], backward: bool = False, depth: int = 0) -> Any:
    """Return the item of the occurrence that comes first when the program runs, or None.

    `found` lists every site in the order in which the program, or its backward pass, runs. It
    assumes that neighbouring sites in loops of the same kind and length are in one loop, all of
    whose sites run in one iteration before any runs in the next.
    """
    pick: Callable[[list[int]], int] = max if backward else min
    for loop, run in itertools.groupby(found, lambda each: each.loops[depth : depth + 1]):
        together = list(run)
        happened = [each for each in together if each.iterations is not None]
        if not happened:
            continue
        if not loop:
            return happened[0].item
        known = [each.iterations[depth] for each in happened if each.iterations is not None]
        numbers = [number for number in known if number is not None]
        if len(numbers) == len(known):
            now = pick(numbers)
            together = [
                each if each.iterations and each.iterations[depth] == now else _absent(each)
                for each in together
            ]
        return find_first(together, backward, depth + 1)
    return None


def _absent(occurrence: Occurrence) -> Occurrence:
    return occurrence._replace(iterations=None)
