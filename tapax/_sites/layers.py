"""Scanned layers: names for the single layers of a module that a loop runs once per layer.

A model that scans over its layers has one site for all layers, `Stack/layers/mlp`, whose values are
stacked. A name with the number of a layer, `Stack/layers/3/mlp`, picks the value of that layer, as
if the model ran its layers without a loop.

>>> site = Site("Stack/layers/mlp", layers=(ScannedLayers("Stack/layers", 0, 4),))
>>> def find(name):
...     return [layer.path for layer in find_layers([name], site, lambda s: s.path == name)]
>>> find("Stack/layers/3/mlp"), find("Stack/layers/7/mlp")
(['Stack/layers/3/mlp'], [])
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tapax._sites.site import ScannedLayers, Site


class LayerNumber(int):
    """The number of a layer: the iteration of a loop whose axis is dropped from the result."""


class LayerName(NamedTuple):
    """The path of a site in one layer, and the number of that layer in each loop.

    The number is None for a loop that the path does not number. Loops are in order, innermost
    first.
    """

    path: str
    numbers: tuple[LayerNumber | None, ...]


_NUMBERED = re.compile(r"(?=(?:^|/)([^/*?]+)/(\d+)(?:[/.:@~]|$))")
"""The name of a module in a glob, followed by the number of a layer."""


def find_layers(
    globs: Sequence[str], site: Site, is_picked: Callable[[Site], bool]
) -> Iterator[LayerName]:
    """Find the single layers that a selection picks from a site that several layers share.

    `globs` are the globs in the selection; `is_picked` is the selection as a predicate.
    """
    for name in _candidates(globs, site, is_picked):
        if all(n is None or n < layers.length for n, layers in _pairs(name, site)):
            yield name


def find_missing_layer(
    globs: Sequence[str], site: Site, is_picked: Callable[[Site], bool]
) -> ScannedLayers | None:
    """Find the scanned layers of a site of which a selection names a layer that does not exist."""
    for name in _candidates(globs, site, is_picked):
        for number, layers in _pairs(name, site):
            if number is not None and number >= layers.length:
                return layers
    return None


def find_unnumbered_layer(site: Site, is_picked: Callable[[Site], bool]) -> str | None:
    """Find the name of a single layer that a selection matches without naming its number.

    Layers in a loop are picked by number, or all together, so such a selection picks nothing.
    """
    for layers in site.layers:
        for number in range(layers.length):
            path = name_layers(site.path, [(layers, number)]).path
            if is_picked(dataclasses.replace(site, path=path)):
                return path
    return None


def _pairs(name: LayerName, site: Site) -> Iterator[tuple[LayerNumber | None, ScannedLayers]]:
    for layers in site.layers:
        yield name.numbers[layers.loop], layers


def _candidates(
    globs: Sequence[str], site: Site, is_picked: Callable[[Site], bool]
) -> Iterator[LayerName]:
    """Yield the names that a selection would pick if there were any number of layers."""
    if not site.layers:
        return
    numbered = [found for glob in globs for found in _NUMBERED.findall(glob)]
    ordered = sorted(site.layers, key=lambda layers: len(layers.path))
    choices = [
        [None, *dict.fromkeys(int(n) for name, n in numbered if layers.module == name)]
        for layers in ordered
    ]
    for chosen in itertools.product(*choices):
        name = name_layers(site.path, zip(ordered, chosen, strict=True))
        if name.path != site.path and is_picked(dataclasses.replace(site, path=name.path)):
            yield name


def name_layers(path: str, chosen: Iterable[tuple[ScannedLayers, int | None]]) -> LayerName:
    """Name the site at `path` in single layers: those with a number, of some scanned layers.

    >>> name_layers("Stack/layers/mlp", [(ScannedLayers("Stack/layers", 0, 4), 3)]).path
    'Stack/layers/3/mlp'
    """
    ordered = sorted(chosen, key=lambda pair: len(pair[0].path))
    numbers: list[LayerNumber | None] = [None] * (1 + max(layers.loop for layers, _ in ordered))
    shift = 0
    for layers, number in ordered:
        if number is not None:
            end = len(layers.path) + shift
            path, shift = f"{path[:end]}/{number}{path[end:]}", shift + len(f"/{number}")
            numbers[layers.loop] = LayerNumber(number)
    return LayerName(path, tuple(numbers))
