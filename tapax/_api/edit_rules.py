"""Rules of edits: which values of which sites an edit changes, and by which function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from tapax._calling.survey import Spot
from tapax._sites import At, Index, LayerNumber, Selection, Site, StepSlice, find, matches, show

Counters: TypeAlias = Mapping[int, Any]
"""The numbers of the current iterations of loops, by the depth of the loop."""


@dataclasses.dataclass(frozen=True)
class EditRule:
    """One edit: the sites that it selects, and the function that it applies; None for an array.

    `of` is `value` or `grad`. `step` is True for an edit of one iteration, whose number is an
    operand, or a slice of iterations. `index` selects a part of the value; None is the whole value.
    """

    of: str
    selection: Selection
    fn: Callable[..., Any] | None
    step: bool | StepSlice = False
    index: Index | None = None

    def picks(self, spot: Spot) -> bool:
        return self.of == spot.key.of and matches(self.selection, spot.site)

    def targets(self, spot: Spot) -> Iterator[Target]:
        """List the values of a site that the rule edits: all of them, or those of single layers."""
        return targets_of(self.selection, spot) if self.of == spot.key.of else iter(())

    def edited_type(self, target: Target) -> Any:
        """The type of the array that the rule edits: the whole value, or a part of it."""
        marked = target.spot.own
        if self.index is None:
            return marked
        return jax.ShapeDtypeStruct(self.index.check(marked.shape, target.site), marked.dtype)

    def __str__(self) -> str:
        argument = "values" if self.of == "value" else "grads"
        return f"{argument}={show(self.selection)}"


@dataclasses.dataclass(frozen=True)
class Target:
    """The values of a site that an edit changes.

    `layers` pairs the depth of each loop over layers with the number of the selected layer. `loop`
    is the depth of the innermost loop that does not run over layers.
    """

    spot: Spot
    site: Site
    layers: tuple[tuple[int, int], ...]
    loop: int | None

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def length(self) -> int | None:
        """The number of iterations of the loop; None if only running the loop can tell."""
        return None if self.loop is None else self.spot.around[self.loop].size

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths of the loops and meshes that give a captured value of the target an axis."""
        return tuple(d for d in self.spot.depths if d not in dict(self.layers))

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the array that a capture of the target returns."""
        sizes = (self.spot.around[d].size for d in self.depths)
        return (*sizes, *self.spot.mapped, *self.spot.own.shape)

    @property
    def spec(self) -> tuple[Any, ...]:
        """The mesh axes over which each axis of the captured array is divided."""
        lead = dict(zip(self.spot.depths, self.spot.spec, strict=False))
        rest = self.spot.spec[len(self.spot.depths) :]
        return (*(lead[depth] for depth in self.depths), *rest)

    def is_now(self, counters: Counters) -> Any:
        """Tell whether the loops over layers have reached the layers of the target."""
        now = [counters[depth] == number for depth, number in self.layers]
        return functools.reduce(jnp.logical_and, now, jnp.array(True))


def whole(spot: Spot) -> Target:
    """Make a target of all values of a site."""
    return Target(spot, spot.site, (), spot.loop)


def targets_of(selection: Selection, spot: Spot) -> Iterator[Target]:
    """List the values of a site that a selection picks: all of them, or those of single layers."""
    for found in find(selection, spot.site):
        layers = zip(spot.loops, found.steps, strict=False)
        pinned = tuple((depth, int(n)) for depth, n in layers if isinstance(n, LayerNumber))
        free = (depth for depth in spot.loops if depth not in dict(pinned))
        site = dataclasses.replace(spot.site, path=found.path)
        yield Target(spot, site, pinned, next(free, None))


class EditOperands(NamedTuple):
    """The arrays of an edit: a value, an iteration, the traced integers of an index."""

    array: Any = None
    step: Any = None
    numbers: tuple[Any, ...] = ()


def make_rule(
    of: str, part: Any, fn: Callable[..., Any] | None, array: Any = None
) -> tuple[EditRule, EditOperands]:
    """Make the rule and the operands of an edit of the sites that `part` selects."""
    if not isinstance(part, At):
        return EditRule(of, part, fn), EditOperands(array)
    numbers = () if part.index is None else part.index.numbers
    index = None if part.index is None else part.index.with_numbers(())
    if part.step is None or isinstance(part.step, StepSlice):
        rule = EditRule(of, part.selection, fn, part.step or False, index)
        return rule, EditOperands(array, None, numbers)
    step = np.int32(part.step) if isinstance(part.step, int) else part.step
    return EditRule(of, part.selection, fn, True, index), EditOperands(array, step, numbers)
